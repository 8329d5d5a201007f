"""The commands, one file each; a file imports what is slow to import when its command is called."""
