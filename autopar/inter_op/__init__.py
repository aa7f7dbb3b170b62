"""Between operators: how layers become stages on meshes, and in which order these work."""
