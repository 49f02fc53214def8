"""Reading programs: what they communicate."""
