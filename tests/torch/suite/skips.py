SKIPS: dict[str, str] = {}
