"""What traced programs compute: which of their values depend on which others."""
