"""What CHESS writes into its journal."""

JOURNAL = {
    "grid_score": (
        "inner product of query anchor and the grid's vector, by grid; scale of squared keys; none: not in the "
        "hierarchy"
    ),
    "chunk_score": (
        "inner product of query anchor and the chunk's vector, by chunk; scale of squared keys; none: not in the "
        "hierarchy"
    ),
    "page_score": (
        "inner product of query anchor and the page's vector, by page; scale of squared keys; none: not in the "
        "hierarchy"
    ),
    "grid_kept": "1 if the grid was kept at this reconstruction, else 0, by grid",
    "chunk_kept": "1 if the chunk was kept at this reconstruction, else 0, by chunk",
    "page_kept": (
        "1 if the page was kept at this reconstruction, else 0, by page; sinks and window are attended besides"
    ),
    "safe_pages": "always attended at this reconstruction: number of sink pages, first page of the window, its end",
    "page_completed": "number of the page whose last token the step before this one fed",
    "page_entropy_nats": (
        "mean entropy of the next-token distributions of that page's tokens; none: it holds prompt tokens"
    ),
    "page_varentropy_nats2": (
        "varentropy of that page in nats squared, as the parameter varentropy defines it; none: it holds prompt tokens"
    ),
    "reconstructed": "of that page: 0 no, 1 yes since it was uncertain, 2 yes since its turn had come",
    "threshold_entropy_nats": "above it a page's entropy is high; noted once; none: the trigger uses no threshold",
    "threshold_varentropy_nats2": (
        "above it a page's varentropy is high; noted once; none: the trigger uses no threshold"
    ),
}
"""name (with its unit) -> what the values are and how they are indexed; see Method.journal_names"""
