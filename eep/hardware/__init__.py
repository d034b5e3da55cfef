"""Signs that hardware fails: what each means for the ranks on it, where they come from, and what is done."""
