"""What lies between draftree and its surroundings: files, options, machines, progress."""
