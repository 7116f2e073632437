"""What telemetry tells about a run: computed when somebody asks, and never stored but forecasts.

`attribution` splits the waiting of ranks by cause, `whatif` forecasts what other presets would
take and decides for `auto`, `report` sums up what each preset achieved, `workers` says how each
rank does at present, and `replay` plans a run again and compares. Called by the API, by the
advisor, and by the commands `paceline replay` and `paceline whatif`.

    with store.read() as connection:
        print(words(attribute(read_rows(connection, key, (None, None)))))
"""
