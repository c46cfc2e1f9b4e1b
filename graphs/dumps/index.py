"""The index of a dump: one ordered list, as Markdown and as HTML."""

import dataclasses

import jinja2

MARKER = "<!-- attn-ops dump -->"
"""First line of index.md; a directory that has it may be replaced by a new dump."""

_SECTIONS = {
    "passes": "Passes, in the order in which they ran",
    "pictures": "Pictures: Mermaid, for a block of Markdown or https://mermaid.live; SVG",
    "final": "Graphs handed to Inductor",
    "inductor": "Inductor's output code",
    "timeline": "A decode step as a timeline",
    "depyf": "depyf's files",
    "data": "Data",
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the list."""

    section: str  # a key of _SECTIONS
    text: str  # one line, Markdown
    files: list[str]  # relative to the dump
    skipped: list[str]  # a pass's reasons for what it left alone


@dataclasses.dataclass(frozen=True)
class Index:
    """What index.md and index.html say."""

    num_graphs: int
    matches: dict[str, str]  # by pass, in words
    summaries: dict[str, str]  # by pass, what it did to a step
    sessions: list[str]
    notes: list[str]
    entries: list[Entry]
    compiled: list[str] = dataclasses.field(default_factory=list)  # in order, why again

    def markdown(self) -> str:
        return _render(_MARKDOWN, self, autoescape=False)

    def html(self) -> str:
        """The list alone, for the page."""
        return _render(_HTML, self, autoescape=True)


def _render(template: str, index: Index, autoescape: bool) -> str:
    environment = jinja2.Environment(autoescape=autoescape, trim_blocks=True, lstrip_blocks=True)
    environment.undefined = jinja2.StrictUndefined
    numbered = list(enumerate(index.entries, 1))
    sections = [
        (title, [(i, e) for i, e in numbered if e.section == key])
        for key, title in _SECTIONS.items()
    ]
    return environment.from_string(template).render(
        index=index, marker=MARKER, sections=[s for s in sections if s[1]]
    )


_MARKDOWN = """\
{{ marker }}
# From Dynamo's graph to Inductor's code

Graphs that Dynamo handed to the backend: {{ index.num_graphs }}.

Matches:{{ "" if index.matches else " no pass ran." }}

{% for name, words in index.matches.items() %}
- {{ name }} {{ words }}
{% endfor %}

{% for name, line in index.summaries.items() %}
{{ name | replace("_", " ") | capitalize }}: {{ line }}.

{% endfor %}
{% for line in index.compiled %}
- compiled {{ line }}
{% endfor %}

{% for session in index.sessions %}
Session: {{ session }}.

{% endfor %}
{% for note in index.notes %}
> {{ note }}

{% endfor %}
{% for title, entries in sections %}
## {{ title }}

{% for number, entry in entries %}
{{ number }}. {{ entry.text }}
{% for file in entry.files %}
    - [{{ file }}]({{ file }})
{% endfor %}
{% for reason in entry.skipped %}
    - left alone: {{ reason }}
{% endfor %}
{% endfor %}

{% endfor %}
"""

_HTML = """\
<h1>From Dynamo's graph to Inductor's code</h1>
<p>Graphs that Dynamo handed to the backend: {{ index.num_graphs }}.</p>
<p>Matches:{{ "" if index.matches else " no pass ran." }}</p>
<ul>
{% for name, words in index.matches.items() %}
<li>{{ name }} {{ words }}</li>
{% endfor %}
</ul>
{% for name, line in index.summaries.items() %}
<p>{{ name | replace("_", " ") | capitalize }}: {{ line }}.</p>
{% endfor %}
<ul>
{% for line in index.compiled %}
<li>compiled {{ line }}</li>
{% endfor %}
</ul>
{% for session in index.sessions %}
<p>Session: {{ session }}.</p>
{% endfor %}
{% for note in index.notes %}
<blockquote>{{ note }}</blockquote>
{% endfor %}
{% for title, entries in sections %}
<h2>{{ title }}</h2>
<ol start="{{ entries[0][0] }}">
{% for number, entry in entries %}
<li>{{ entry.text }}
{% for file in entry.files %}<br><a href="{{ file }}">{{ file }}</a>{% endfor %}
{% for reason in entry.skipped %}<br>left alone: {{ reason }}{% endfor %}
</li>
{% endfor %}
</ol>
{% endfor %}
"""
