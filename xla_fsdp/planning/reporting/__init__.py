"""What is told of a plan: text, tables, pictures, JSON."""
