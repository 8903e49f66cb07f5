"""What is known of TPUs: chips, slices, links, compiler options."""
