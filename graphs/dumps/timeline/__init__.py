"""A timeline: what the kernels of one decode step took, in the order in which they began.

`dump.json` holds it under "timeline", a dict:

    "kind": "replay", of a captured step on a GPU, "called", of CPU operators of a called step, or
        "profile", of a call of the function that `dump` was given.
    "what": that in words, for people.
    "device": whose kernels or operators they are, "cuda:0" or "cpu".
    "model": class of the model; null for "profile", as are "batch" to "seq_len".
    "batch": the step's key in words.
    "num_tokens", "num_reqs": rows and requests of the step.
    "seq_len": tokens in the cache of every request, the new one included.
    "replay_us": median of replays or calls, measured with CUDA events; null on a CPU.
    "span_us": from the first kernel's begin to the last one's end.
    "sum_us": time in which at least one kernel ran; "gap_us": the rest of "span_us".
    "bandwidth": bytes a second of a copy on the device, read and written; null: not measured.
    "bandwidth_from": how it was measured, or why not.
    "num_layers": how often the sequence of kernels comes that was taken for a layer; 0: never.
    "notes": for which kernels bytes are not known, and why.
    "trace": file with the raw trace, for Perfetto or chrome://tracing.
    "groups": {group: {"us", "bytes", "share", "num_kernels"}}, largest time first. "us" are sums
        of durations; "bytes" and "share" are those of kernels whose bytes are known.
    "kernels": a list of dicts:
        "name": of the kernel or operator.
        "start_us": from the first kernel's begin, when those before had ended; "us": from there on.
        "early_us": before that, in which it waited on the device beside others.
        "gap_us": idle time of the device before it.
        "layer": 0 for the first layer; null before, between and after layers.
        "group": "products", "attention", "KV write", "norm, pointwise", "sampling" or "other".
        "bytes": that it has to move at least; null: not known.
        "share": bytes over "us", as a part of "bandwidth"; null where one is not known.
        "detail": what it computes, "[8, 4096] x [4096, 6144]"; may be empty.

Rows of the step are padding. Each reads "seq_len" cached tokens, as many as a request may have, of
blocks that hold whatever they hold, and writes only the null block.
"""
