"""What each verb does; imported when the verb runs."""
