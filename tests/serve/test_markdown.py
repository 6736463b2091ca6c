"""The Markdown of the page: no text that a model may write freezes it, and a growing answer ends like a whole one."""

import pytest
from page_driver import answers, ask, script

# Texts are HEAD UNIT UNIT ... TAIL: of all kinds with characters, of some with blocks.
HEADS = ["", "# ", "# a", "- ", "> ", "```", "```a", "**", "**a", "*a", "_a", "`", "`a", "1. ", "   ", "a"]
CHARACTERS = [*" \t#`~*_->1a•\r\u2028\u00a0", " #", "# ", "* ", "` ", "a ", "*a", "_a", "`a", "` `", "- "]
BLOCKS = [
    "\n",
    "**a**",
    "`a`",
    "*a* ",
    "_a_ ",
    "`a``a",
    "  -",
    "\n- a",
    "\n  - a",
    "\n# a",
    "\n> a",
    "\n1. ",
]
BLOCKS += ["\n```", "\n~~~\n", "\n\n---\n", "a\n", "\n\n", "<b>", "](", "**a*", "a*a_"]
TAILS = ["", "x", "`", "#", "*", "_", " x", "\rx", "x\rx", "x\u2028x"]
WORDS = [
    *"abc#-*_`~>\t\r\u2028é",
    "b c",
    " ",
    "  ",
    "\n",
    "\n\n",
    "# ",
    "- ",
    "* ",
    "**",
    "``",
    "```",
    "~~~",
    "> ",
]
WORDS += ["1. ", "2) ", "---", "***", "    ", "+ ", "js", "<b>"]
LIMIT_MS = 200  # for 10,000 characters, in the best of four attempts

# Each case grows until it is slow, so that one that would never end is found while it is short.
REPEATS = """async ([heads, characters, blocks, tails, limit]) => {
  const { showMarkdown } = await import('/markdown.js');
  const measure = text => {
    const start = performance.now();
    showMarkdown(document.createElement('div'), text);
    return performance.now() - start;
  };
  const slow = [];
  let texts = 0;
  const grow = (head, unit, tail) => {
    for (const length of slow.length < 3 ? [100, 200, 400, 800, 10000] : []) {
      const text = head + unit.repeat(length / unit.length) + tail;
      texts += 1;
      let took = measure(text);
      for (let again = 0; again < 3 && took > limit; again += 1) took = Math.min(took, measure(text));
      if (took <= limit) continue;
      slow.push([head, unit, tail, length, took]);
      return;
    }
  };
  for (const head of heads) {
    for (const unit of characters) for (const tail of tails) grow(head, unit, tail);
    blocks.forEach((unit, at) => grow(head, unit, tails[at % tails.length]));
  }
  return [texts, slow];
}"""

STREAMS = """async ([words, count]) => {
  const { showMarkdown } = await import('/markdown.js');
  let state = 20;
  const random = n => (state = (state * 1103515245 + 12345) % 2147483648) % 65536 % n;
  const different = [];
  for (let i = 0; i < count; i += 1) {
    const text = Array.from({ length: 1 + random(16) }, () => words[random(words.length)]).join('');
    const [whole, grown] = [1, 2].map(() => document.createElement('div'));
    showMarkdown(whole, text);
    for (let at = 0; at < text.length;) {
      at += 1 + random(5);
      showMarkdown(grown, text.slice(0, at));
    }
    if (grown.innerHTML !== whole.innerHTML) different.push(text);
    showMarkdown(grown, 'another');
    if (grown.innerHTML !== '<p>another</p>') different.push(text);
  }
  return different;
}"""

GROWTH = """async ([piece, times]) => {
  const { showMarkdown } = await import('/markdown.js');
  const node = document.createElement('div');
  const start = performance.now();
  for (let n = 1; n <= times; n += 1) showMarkdown(node, piece.repeat(n));
  return [performance.now() - start, node.children.length, node.querySelectorAll('code').length];
}"""


def test_no_text_freezes_the_page(page):
    texts, slow = page.evaluate(REPEATS, [HEADS, CHARACTERS, BLOCKS, TAILS, LIMIT_MS])
    assert slow == []
    assert texts > 15_000


def test_an_answer_in_pieces_ends_like_a_whole_one(page):
    assert page.evaluate(STREAMS, [WORDS, 3_000]) == []


@pytest.mark.parametrize(
    ("piece", "times", "blocks"),
    [("word **bold**\n\n", 6_000, 6_000), ("- item\n", 300, 1), ("word `code` ", 300, 1)],
)
def test_a_growing_answer_costs_its_last_block(page, piece, times, blocks):
    took, children, _ = page.evaluate(GROWTH, [piece, times])
    assert children == blocks
    assert took < 5_000


def test_an_answer_of_many_marks_is_shown(page):
    """More nodes than a call can have arguments."""
    assert page.evaluate(GROWTH, ["`a` " * 100_000, 1])[1:] == [1, 100_000]


def test_the_page_answers_while_a_hostile_answer_arrives(page):
    lines = ["# " + " " * 1_600 + "x\rx", "```" + " " * 3_000 + "`", "`" * 3_000, "- " + " " * 3_000 + "x\r"]
    script(page, *({"content": line + "\n\n"} for line in lines))
    ask(page, "go")
    assert answers(page).text_content().count("x") == 3
