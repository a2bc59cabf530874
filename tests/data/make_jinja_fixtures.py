#!/usr/bin/env python3
"""Writes tests/data/jinja_cases.json: small templates for every construct that the server supports, and what jinja2 renders
for them. Run it as make_chat_fixtures.py, which has the environment.
"""
import json
import os

from make_chat_fixtures import HERE, NOW, environment, render, write

VARIABLES = {
    "a": 5, "s": "hello world", "e": "", "t": True, "n": None, "l": [3, 1, 2], "m": ["b", "A", "c"], "w": "  two\twords \n",
    "u": "caf\u00e9 \U0001f600 x", "odd": "\u2003x\x1c",
    "accents": ["\u00e9a\u00e9\u00e8", "\u00e8\u00e9"], "escapes": "tab\t\n\\ \x00\x1f\x7f\u00a0\u2028", "html": "<a href='x'>&\"</a>", "d": {"b": 1, "A": "two", "c": [1, None, True, 1.5]},
    "reals": [2.5, 1e-7, 1e22, 0.1], "users": [{"name": "Ann", "age": 30, "on": True}, {"name": "bob", "age": 25, "on": False},
                                               {"name": "Cy", "age": 30}],
}

CASES = r"""
{{ a + 1 }} {{ a - 7 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ (1 + 2) - 3 }} {{ 1 - 2 - 3 }}
{{ "a" + "b" }} {{ ([1] + [2])|tojson }} {{ 7 % 3 ~ 1 }} {{ "x" ~ a ~ none ~ true }}
{{ "a" + 1 }}
{{ 1 + none }}
{{ "1" == 1 }} {{ none == false }} {{ [1, 2] == [1, 2] }} {{ {"a": 1, "b": 2} == {"b": 2, "a": 1} }} {{ {"a": 1} == {"a": 2} }}
{{ 2 >= 2 }} {{ 2 != 2 }} {{ 1 < 2 }} {{ 3 <= 2 }} {{ 3 > 2 }}
{{ "a" < 1 }}
{{ 1 in l }} {{ 9 not in l }} {{ "ell" in s }} {{ "b" in d }} {{ "x" in nothing }} {{ not 1 in l }} {{ "a" in "abc" and "d" not in "abc" or false }}
{{ 1 in "abc" }}
{{ true and 0 }} {{ false or "x" }} {{ not e }} {{ 1 and 2 or 3 }} {{ none or "y" }} {{ not none and t }} {{ not true or true }}
{{ "yes" if t else "no" }} {{ "yes" if e }} {{ 1 if e else 2 if e else 3 }} {{ ("a" if e) is defined }}
{{ nothing }} {{ d.nothing }} {{ n.x }} {{ a.x }} {{ l.x }} {{ l[9] }} {{ n }} {{ d["nothing"] }} {{ l["0"] }} {{ d[l] }}
{{ nothing.x }}
{{ d.nothing.x }}
{{ nothing[0] }}
{{ nothing + 1 }}
{{ nothing() }}
{{ a() }}
{{ d.b }} {{ d["A"] }} {{ d.c[3] }} {{ d.get("b") }} {{ d.get("x", 7) }} {{ d.get("x") }} {{ d.items()|list|tojson }}
{{ l[0] }} {{ l[-1] }} {{ {"a": {"b": 1}}["a"]["b"] }} {{ [[1]][0][0] }} {{ l[a - 4:]|tojson }}
{{ l[1:]|tojson }} {{ l[:2]|tojson }} {{ l[::-1]|tojson }} {{ l[-2:]|tojson }} {{ l[5:]|tojson }} {{ l[1:1]|tojson }} {{ l[-100:100]|tojson }} {{ l[2:1]|tojson }}
{{ s[2:5] }} {{ u[2:6] }} {{ s[8:2] }} {{ s[-3:] }} {{ s[:-1] }} {{ u[:4] }} {{ u[5:] }}
{{ []|tojson }} {{ (1) }} {{ {}|tojson }} {{ {"a": 1, "b": {"c": []}}|tojson }} {{ [1, 2,]|tojson }} {{ {"a": 1,}|tojson }}
{{ w.strip() }} {{ w.lstrip() }} {{ w.rstrip() }} {{ "xxaxx".strip("x") }} {{ "abcba".lstrip("ab") }} {{ "".strip() }} {{ odd.strip() }} {{ "xx".strip("x") }} {{ accents[0].strip(accents[1]) }}
{{ "a,b,,c".split(",")|tojson }} {{ "".split(",")|tojson }} {{ "a--b".split("--")[-1] }}
{{ "abc".split("") }}
{{ s.startswith("hell") }} {{ "".startswith("") }} {{ s.endswith("d") }} {{ s.endswith("hello") }}
{% for k, v in d.items() %}{{ k }}={{ v|tojson }};{% endfor %} {% for k, v in d|items %}{{ k }}{% endfor %}
{{ (html|safe) }} {{ nothing|default("x") }} {{ e|default("x") }} {{ e|default("x", true) }} {{ none|default("y", boolean=true) }} {{ n|default("x") }}
{{ l|first }} {{ []|first }} {{ l|last }} {{ []|last }}
{{ d|items|list|tojson }} {{ nothing|items|list|length }} {{ l|join }} {{ l|join(", ") }} {{ s|length }} {{ u|length }} {{ d|length }} {{ nothing|length }} {{ l|list|tojson }}
{{ 5|length }}
{{ l|map("string")|list|tojson }} {{ users|map(attribute="name")|join(",") }} {{ [" a ", "b "]|map("trim")|join }} {{ [[1, 2], [3]]|map("length")|list|tojson }}
{{ [0, 1, "", "a"]|select|list|tojson }} {{ [0, 1]|reject|list|tojson }} {{ [1, "a"]|select("string")|list|tojson }} {{ [1, 5]|reject("equalto", 5)|list|tojson }}
{{ users|selectattr("on")|map(attribute="name")|join }} {{ users|rejectattr("on")|map(attribute="name")|join(",") }} {{ users|selectattr("age", "eq", 30)|list|length }} {{ users|selectattr("on", "defined")|list|length }} {{ users|rejectattr("age", "equalto", 30)|map(attribute="name")|first }} {{ users|selectattr("on", "undefined")|list|length }}
{{ 5|string + "x" }} {{ true|string }}
{{ d|tojson }} {{ u|tojson }} {{ html|tojson }} {{ none|tojson }} {{ reals|tojson }} {{ escapes|tojson }}
{{ d|tojson(indent=2) }} {{ []|tojson(indent=2) }} {{ {}|tojson(indent=2) }} {{ d|tojson(indent=0) }} {{ {"a": {"b": [1, "x"]}}|tojson(indent=4) }}
{{ nothing|tojson }}
{{ w|trim }} {{ "xxaxx"|trim("x") }} {{ 5|trim }}
{{ a is defined }} {{ nothing is defined }} {{ nothing is undefined }} {{ a is eq(5) }} {{ a is equalto(5) }} {{ false is false }} {{ 0 is false }} {{ true is true }} {{ strftime_now is defined }}
{{ s is iterable }} {{ 5 is iterable }} {{ nothing is iterable }} {{ d is mapping }} {{ l is mapping }} {{ l is sequence }} {{ s is sequence }} {{ d is sequence }} {{ 5 is sequence }} {{ n is sequence }}
{{ n is none }} {{ nothing is none }} {{ s is string }} {{ a is string }} {{ nothing is string }} {{ "a" is not string }} {{ not a is string }} {{ s is string and a is defined }}
{{ none is defined }} {{ users[0].on is true }} {{ (1 if e) is none }} {{ 1 if a is eq(5) else 2 }} {{ a is not none and a }} {{ not a == 5 }}
{% for x in nothing %}x{% endfor %} {% for k in d %}{{ k }},{% endfor %} {% for x in [] %}x{% endfor %}
{% for x in 5 %}{% endfor %}
{% for x in none %}{% endfor %}
{% for x in l if x > 1 %}{{ loop.index }}:{{ x }} {% endfor %} {% for x in l if x > 9 %}{{ x }}{% endfor %}
{% for a, b in [[1]] %}{% endfor %}
{% set d.x = 1 %}
{% macro f(a) %}{% endmacro %}{{ f(1, 2) }}
{% macro f(a) %}{% endmacro %}{{ f(z=2) }}
{{ raise_exception("no " ~ s) }}
{{ strftime_now("%d %b %Y") }} {{ strftime_now("%Y-%m-%d %A %B %j %%") }}
a {# a comment #} b {#- strip -#} c {# {{ nothing.x }} {% if %} #} d
  {% if t %}
    indented
  {% endif %}
end
x {%- if t -%}  y  {%- endif -%}  z {{- s -}}   w
{{ "a" }}
{{ "b" -}}
   c
  {# trimmed #}
   {{ "kept" }}
  text {% set z = 1 %} more
{{ "%}" }} {{ '}}' }} {{ "{{" }} {% set x = "{% if %}" %}{{ x }} {{ '\n\t\\\'\"' }}
{% if t %}
{% endfor %}
{{ 1 + }}
{{ s|nope }}
{{ s is nope }}
{{ "unclosed }}
{# unclosed
{{ (1, 2 }}
{{ 1 2 }}
{% set 1 = 2 %}
{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }} {% endfor %}
{% for a, b in [[1, 2], [4, "x"]] %}{{ a }}{{ b }} {% endfor %} {% for x in l %}{% for y in m %}{{ loop.index }}{{ x }} {% endfor %}{{ loop.index }}{% endfor %}
{% set x = 1 %}{% for y in l %}{% set x = x + y %}{{ x }} {% endfor %}{{ x }} {% if t %}{% set x = 9 %}{% endif %}{{ x }} {% for i in l %}{% set inner = i %}{% endfor %}{{ inner }}|
{% set ns = namespace(x=0, y="s") %}{% for y in l %}{% set ns.x = ns.x + y %}{% endfor %}{{ ns.x }}{{ ns.y }}{{ ns.z }}| {% set ns.z = 1 %}{{ ns.z }}
{% macro f(a, b) %}{{ a }}{{ b }} {% endmacro %}{{ f(1) }}{{ f(1, 3) }}{{ f(b=5, a=4) }}{{ f() }}{{ f(1)|trim }}
{% set v = "late" %}{% macro g() %}{{ v }}{{ later }}{{ x }}{% endmacro %}{% set later = "r" %}{{ g() }} {% for x in l %}{{ g() }}{% endfor %} {% macro h(i) %}{{ i }}{% if i > 0 %}{{ h(i - 1) }}{% endif %}{% endmacro %}{{ h(3) }}
{% if e %}1{% elif n %}2{% elif t %}3{% else %}4{% endif %} {% if e %}1{% elif n %}2{% else %}4{% endif %} {%if t%}tight{%endif%}
"""

# jinja2 renders these, and the server refuses them.
REFUSED = r"""
{{ 7 / 2 }}
{{ 7 // 2 }}
{{ 2 * 3 }}
{{ 2 ** 10 }}
{{ +a }}
{{ 1.0 }}
{{ 1 < 2 < 3 }}
{{ (1, 2) }}
{{ l }}
{{ d }}
{{ "a" "b" }}
{{ s[0] }}
{{ s[::-1] }}
{{ l[::2] }}
{{ "a" < "b" }}
{{ s|upper }}
{{ s.upper() }}
{{ s.replace("o", "0") }}
{{ "a,b".split(",", 1) }}
{{ "a b".split() }}
{{ d.items }}
{{ d.keys() }}
{{ l.append(1) }}
{{ l|sort }}
{{ u|tojson(ensure_ascii=true) }}
{{ l|tojson(separators=(",", ":")) }}
{{ l|map("upper")|list }}
{{ l|select("odd")|list }}
{{ a is number }}
{{ s is eq s }}
{% for c in "ab" %}{{ c }}{% endfor %}
{% for x in [] %}x{% else %}none{% endfor %}
{% for x in l %}{% break %}{% endfor %}
{% for x in l recursive %}{% endfor %}
{% for x in l %}{{ loop.revindex }}{% endfor %}
{% for x in l %}{{ loop.cycle(1, 2) }}{% endfor %}
{{ range(3)|list }}
{{ dict(a=1) }}
{% raw %}{{ x }}{% endraw %}
{% set block %}a{% endset %}
{% set a, b = 1, 2 %}
{% macro f(a=1) %}{% endmacro %}
{% filter upper %}abc{% endfilter %}
{% with %}{% endwith %}
{% generation %}gen{% endgeneration %}
{%+ if t %}kept{% endif %}
{{ [strftime_now][0]("%Y") }}
"""


def split_cases():
    """Yields the cases. A line is a case, except for the cases with line breaks: `joined` has how each of them begins, and
    its number of lines."""
    lines = CASES.strip("\n").split("\n")
    joined = {"  {% if t %}": 4, '{{ "b" -}}': 5}
    at = 0
    while at < len(lines):
        count = next((n for start, n in joined.items() if lines[at].startswith(start)), 1)
        yield "\n".join(lines[at:at + count])
        at += count


def main():
    env, out, errors = environment(), [], 0
    for text in split_cases():
        for source in (text, text + "\n"):
            try:
                result, error = render(env.from_string(source), VARIABLES)
            except Exception as wrong:
                result, error = None, str(wrong)
            errors += error is not None
            out.append({"template": source, **({"error": error} if error is not None else {"text": result})})
    refused = REFUSED.strip("\n").split("\n")
    write(os.path.join(HERE, "jinja_cases.json"), '{"now": %d,\n"variables": %s,\n"cases": [\n%s\n],\n"refused": [\n%s\n]}\n' % (
        NOW, json.dumps(VARIABLES), ",\n".join(map(json.dumps, out)), ",\n".join(map(json.dumps, refused))))
    print(len(out), "cases,", errors, "of them errors")


if __name__ == "__main__":
    main()
