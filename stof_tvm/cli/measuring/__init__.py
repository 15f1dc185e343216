"""What `stof bench` measures: calls, calls of many lengths, and what else the machine does meanwhile."""
