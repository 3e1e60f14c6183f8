def dry_run():
    pass
