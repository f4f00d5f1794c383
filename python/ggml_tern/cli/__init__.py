"""The commands, a file each: options and help here, the work itself in the other packages."""
