"""Workers that carry out the items of a study or a sweep: in this process, in processes of their own, or as actors of a
Ray cluster."""
