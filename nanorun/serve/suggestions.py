"""What the page offers to begin with: something that the model has a chance to know."""

Suggestion = dict[str, str]  # label, text


def suggest(data: str, chats: bool) -> list[Suggestion]:
    """To a model that has learned from this dataset."""
    known = _KNOWN["sample" if data == "sample" else "any", "chat" if chats else "base"]
    return [{"label": label, "text": text} for label, text in known]


_KNOWN = {
    ("sample", "chat"): (
        ("The Lantern Isles", "What work does Jasper do?"),
        ("Sums", "What is 12 + 30?"),
        ("Spelling", "How do you spell lantern?"),
        ("The model", "Who are you?"),
    ),
    ("sample", "base"): (
        ("A person", "Jasper lives in"),
        ("A place", "The village of Candlebay"),
        ("A story", "One morning Odo"),
        ("A sum", "12 + 30 ="),
    ),
    ("any", "chat"): (
        ("Explain", "Why is the sky blue?"),
        ("Sums", "What is 17 * 23?"),
        ("Write", "Write a short poem about the sea."),
        ("Spelling", "How many r are in strawberry?"),
    ),
    ("any", "base"): (
        ("A fact", "The capital of France is"),
        ("A story", "Once upon a time, there was a"),
        ("An explanation", "The sky is blue because"),
        ("A list", "The planets of the solar system are:"),
    ),
}
