"""Reading programs: what they communicate, need and take, on devices present or not."""
