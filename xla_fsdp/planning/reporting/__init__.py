"""Reports on a plan: text, tables, pictures, JSON."""
