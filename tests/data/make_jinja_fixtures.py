#!/usr/bin/env python3
"""Writes tests/data/jinja_cases.json: small templates for every construct of Jinja's Template Designer Documentation that
chat templates may use, and what jinja2 renders for them. Run it as make_chat_fixtures.py, which has the environment.
"""
import json
import os

from make_chat_fixtures import HERE, NOW, environment, render, write

VARIABLES = {
    "a": 5, "f": 2.5, "s": "hello world", "e": "", "t": True, "n": None, "big": 10 ** 15, "tiny": 1e-7, "huge": 1e22,
    "l": [3, 1, 2], "m": ["b", "A", "c"], "w": "  two\twords \n", "u": "caf\u00e9 \U0001f600 x", "html": "<a href='x'>&\"</a>",
    "d": {"b": 1, "A": "two", "c": [1, None, True, 1.5], "items": "mine"}, "nested": [[1, 2], [3, [4]], []],
    "users": [{"name": "Ann", "age": 30, "on": True}, {"name": "bob", "age": 25, "on": False}, {"name": "Cy", "age": 30}],
}

CASES = r"""
{{ a + 1 }} {{ a - 7 }} {{ 7 % 3 }} {{ -7 % 3 }}
{{ (1 + 2) * 3 }} {{ - -a }}
{{ big }} {{ tiny }} {{ huge }}
{{ "a" + "b" }} {{ "ab" * 3 }} {{ 3 * "ab" }} {{ [1] + [2] }} {{ (1,) + (2,) }}
{{ "a" + 1 }}
{{ 1 + none }}
{{ 1 / 0 }}
{{ "1" == 1 }} {{ true == 1 }} {{ none == false }} {{ [1, 2] == [1, 2] }} {{ (1, 2) == [1, 2] }}
{{ "a" < "b" }} {{ 2 >= 2 }} {{ 2 != 2 }}
{{ "a" < 1 }}
{{ 1 in l }} {{ 9 not in l }} {{ "ell" in s }} {{ "b" in d }} {{ "x" in nothing }} {{ 1 in (1, 2) }} {{ not 1 in l }}
{{ 1 in "abc" }}
{{ true and 0 }} {{ false or "x" }} {{ not e }} {{ 1 and 2 or 3 }} {{ none or [] }} {{ not none and t }}
{{ "yes" if t else "no" }} {{ "yes" if e }} {{ 1 if e else 2 if e else 3 }} {{ ("a" if e) is defined }}
{{ nothing }} {{ d.nothing }} {{ n.x }} {{ a.x }} {{ l.x }} {{ l[9] }} {{ s[99] }} {{ n }} {{ d["nothing"] }}
{{ nothing.x }}
{{ d.nothing.x }}
{{ nothing[0] }}
{{ nothing + 1 }}
{{ nothing() }}
{{ a() }}
{{ d.b }} {{ d["A"] }} {{ d["items"] }} {{ d.items()|list }} {{ d.c[3] }} {{ d.get("b") }} {{ d.get("x", 7) }} {{ d.get("x") }}
{{ l[0] }} {{ l[-1] }} {{ s[0] }} {{ s[-1] }} {{ u[3] }} {{ u[5] }} {{ d[["x"]] }} {{ l["0"] }}
{{ l[1:] }} {{ l[:2] }} {{ l[::-1] }} {{ l[-2:] }} {{ s[2:5] }} {{ s[::-1] }} {{ s[1:8:3] }} {{ u[2:6] }} {{ l[5:] }} {{ s[8:2] }} {{ s[-3:] }} {{ l[1:1] }} {{ l[::100] }} {{ l[-100:100] }} {{ (1, 2, 3)[1:] }} {{ u[::-1] }}
{{ l[::0] }}
{{ [] }} {{ () }} {{ (1) }} {{ {} }} {{ {"a": 1, "b": {"c": []}} }} {{ [1, 2,] }} {{ {"a": 1,} }}
{{ ["it's", 'say "x"', "both '\"", "tab\t\n\\", "\x00\x7f\u00e9\u00a0"] }}
{{ "\u00e9\u0436\u03b1 \u4e16 x"|upper }} {{ "\u00c9\u0416\u0391 X"|lower }} {{ ["\u00c9a", "\u00e9b", "z"]|sort }}
{{ s.upper() }} {{ s.capitalize() }} {{ "ABC".lower() }}
{{ w.strip() }} {{ w.lstrip() }} {{ w.rstrip() }} {{ "xxaxx".strip("x") }} {{ "abcba".lstrip("ab") }} {{ "abc".rstrip("") }} {{ "".strip() }} {{ "\u2003x\x1c".strip() }} {{ "xx".strip("x") }}
{{ "a,b,,c".split(",") }} {{ "a,b,c".split(",", 1) }} {{ "".split(",") }} {{ "abc".split("b", maxsplit=0) }} {{ "a--b".split("--")[-1] }}
{{ "abc".split("") }}
{{ s.startswith("hell") }} {{ "".startswith("") }}
{{ s.index("zz") }}
{{ s.replace("o", "0") }} {{ "aaa".replace("aa", "b") }}
{{ "-".join([1]) }}
{{ "{} and {}".format(1, "b") }}
{{ "{}".format() }}
{{ "%s, %s!"|format("Hi", "you") }}
{{ "%s %s" % "x" }}
{{ "%s" % (1, 2) }}
{{ l.append(1) }}
{{ d.update({}) }}
{{ d.pop("b") }}
{{ s.__class__ }}
{{ d.keys()|list }} {{ d.values()|list }} {{ d.keys()|length }} {{ d.items()|first }} {% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}
{{ (html|safe) }} {{ "<i>"|safe + "<b>" }} {{ "<b>" + "<i>"|safe }} {{ "<i>"|safe ~ "<b>" }} {{ ("<i>"|safe)|length }}
{{ s|capitalize }} {{ l|count }} {{ nothing|default("x") }} {{ e|d("x") }} {{ e|d("x", true) }} {{ nothing|d }} {{ n|d("x") }} {{ none|default("y", boolean=true) }}
{{ d|dictsort }}
{{ {"b": 2, "a": 3, "C": 1}|dictsort }}
{{ l|first }} {{ s|first }} {{ []|first }} {{ l|last }} {{ s|last }} {{ []|last }}
{{ "42"|int }} {{ "x"|int }} {{ true|int }} {{ none|int }}
{{ "a\nb\n\nc"|indent }} {{ "a\nb"|indent(2, true) }} {{ "a\n"|indent }} {{ ""|indent(2) }}
{{ d|items|list }} {{ nothing|items|list }} {{ l|join }} {{ l|join(", ") }} {{ s|length }} {{ u|length }} {{ d|length }} {{ nothing|length }} {{ s|list }} {{ d|list }} {{ (1, 2)|list }} {{ u|list|length }}
{{ 5|length }}
{{ "ABC"|lower }} {{ "abc"|upper }} {{ 5|upper }} {{ none|upper }} {{ "foo bar-baz (qux)"|title }} {{ "it's"|title }}
{{ l|map("string")|list }} {{ users|map(attribute="name")|join(",") }} {{ m|map("upper")|join }} {{ m|map("replace", "b", "x")|list }} {{ [[1, 2], [3]]|map("length")|list }} {{ nested|map("first")|list|length }}
{{ l|min }} {{ m|min }}
{{ [0, 1, "", "a"]|select|list }} {{ [0, 1]|reject|list }} {{ l|select("in", [1, 2])|list }}
{{ users|selectattr("on")|map(attribute="name")|list }} {{ users|rejectattr("on")|map(attribute="name")|list }} {{ users|selectattr("age", "eq", 30)|list|length }} {{ users|selectattr("on", "defined")|list|length }} {{ users|rejectattr("age", "equalto", 30)|map(attribute="name")|first }}
{% if []|select %}generators are true{% endif %} {% set g = l|map("string") %}{{ g|list }}{{ g|list }}
{{ l|sort }} {{ m|sort }} {{ users|sort(attribute="age")|map(attribute="name")|list }} {{ d|sort }}
{{ [1, "a"]|sort }}
{{ 5|string + "x" }} {{ [1]|string }}
{{ d|tojson }} {{ u|tojson }} {{ html|tojson }} {{ u|tojson(ensure_ascii=true) }} {{ (1, 2)|tojson }} {{ none|tojson }}
{{ d|tojson(indent=2) }} {{ []|tojson(indent=2) }} {{ {}|tojson(indent=2) }} {{ d|tojson(separators=(",", ":")) }} {{ d|tojson(indent=0) }} {{ [1, 2]|tojson(indent=1, separators=("; ", "= ")) }}
{{ nothing|tojson }}
{{ d.items()|tojson }}
{{ l|map("string")|tojson }}
{{ w|trim }} {{ "xxaxx"|trim("x") }} {{ 5|trim }} {{ ["a", "A", "b", "a"]|unique|list }} {{ 515|replace(5, 6) }}
{{ t is boolean }} {{ 1 is boolean }} {{ a is defined }} {{ nothing is defined }} {{ nothing is undefined }} {{ a is eq 5 }} {{ a is equalto(5) }} {{ a is ne 5 }} {{ false is false }} {{ 0 is false }} {{ true is true }}
{{ f is float }} {{ a is integer }} {{ t is integer }} {{ t is number }} {{ s is number }} {{ 1 is in l }} {{ 9 is not in(l) }} {{ "h" is in s }}
{{ s is iterable }} {{ 5 is iterable }} {{ nothing is iterable }} {{ d is mapping }} {{ l is mapping }} {{ l is sequence }} {{ s is sequence }} {{ d is sequence }} {{ 5 is sequence }} {{ nothing is sequence }} {{ n is sequence }} {{ (l|map("string")) is sequence }}
{{ n is none }} {{ nothing is none }} {{ s is string }} {{ a is string }} {{ nothing is string }} {{ "a" is not string }} {{ not a is string }} {{ s is string and a is number }}
{{ 1 is none }} {{ none is defined }} {{ users[0].on is true }} {{ (1 if e) is none }}
{% for x in [] %}x{% else %}none{% endfor %} {% for x in nothing %}x{% else %}none{% endfor %} {% for c in "ab" %}{{ c }}.{% endfor %} {% for k in d %}{{ k }},{% endfor %}
{% for x in 5 %}{% endfor %}
{% for x in none %}{% endfor %}
{% for x in l if x > 1 %}{{ loop.index }}:{{ x }} {% else %}no{% endfor %} {% for x in l if x > 9 %}{{ x }}{% else %}no{% endfor %} {% for x in l if loop is defined %}{{ x }}{% endfor %}
{% for a, b in [(1,)] %}{% endfor %}
{% for x in range(10) %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 5 %}{% break %}{% endif %}{{ x }}{% endfor %} {% for x in l %}{% for y in m %}{% break %}{% endfor %}{{ x }}{% else %}e{% endfor %}
{{ range(1000000)|length }}
{% set a, b = [1] %}
{% set d.x = 1 %}
{% macro f(a) %}{% endmacro %}{{ f(1, 2) }}
{% macro f(a) %}{% endmacro %}{{ f(z=2) }}
{{ raise_exception("no " ~ s) }}
{{ strftime_now("%d %b %Y") }} {{ strftime_now("%Y-%m-%d %A %B %j %%") }}
a {# a comment #} b {#- strip -#} c {# {{ nothing.x }} {% if %} #} d
{% raw %}{{ x }} {% if %} {# #}{% endraw %}| {%- raw -%}  {{ y }}  {%- endraw -%} |
  {% if t %}
    indented
  {% endif %}
end
x {%- if t -%}  y  {%- endif -%}  z {{- s -}}   w {%+ if t %} kept{% endif +%}
   {%+ if t %}left{% endif %}
{{ "a" }}
{{ "b" -}}
   c
  {# trimmed #}
   {{ "kept" }}
  text {% set z = 1 %} more
{{ "%}" }} {{ '}}' }} {{ "{{" }} {% set x = "{% if %}" %}{{ x }} {{ {"a": {"b": 1}}["a"]["b"] }} {{ [[1]][0][0] }}
{{ a|default(1) + 1 }} {{ s|upper|lower|length + 1 }} {{ "x" ~ a|string ~ "y" }} {{ s is string and l is not string }} {{ 1 if a is eq(5) else 2 }} {{ (s|upper).lower() }} {{ s.upper()|lower }} {{ a is not none and a }} {{ l[a - 4:] }} {{ not a == 5 }}
{% include "x" %}
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
{% set true = 2 %}
{% macro f(a=1, b) %}{% endmacro %}
{{ loop }}
{% break %}
{{ "a" "b" 'c' }} {{ "\n\t\\\"\x41\u00e9" }}
{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }} {% endfor %}
{% for a, b in [(1, (2, 3)), [4, "x"]] %}{{ a }}{{ b }} {% endfor %} {% for k, v in {"b": 2, "A": 1}|dictsort %}{{ k }}{% endfor %}
{% for x in l %}{% for y in m %}{{ loop.index }}{{ x }} {% endfor %}{{ loop.index }}{% endfor %}
{{ range(3)|list }} {{ range(1, 4)|list }} {{ range(5, 0, -2)|list }} {{ range(0)|length }} {% for i in range(2) %}{{ i }}{% endfor %}
{% set x = 1 %}{% for y in l %}{% set x = x + y %}{{ x }} {% endfor %}{{ x }} {% if t %}{% set x = 9 %}{% endif %}{{ x }} {% for i in l %}{% set inner = i %}{% endfor %}{{ inner }}|
{% set ns = namespace(x=0, y="s") %}{% for y in l %}{% set ns.x = ns.x + y %}{% endfor %}{{ ns.x }}{{ ns.y }}{{ ns.z }}| {% set ns.z = [1] %}{{ ns.z }}
{% set block %}a {{ 1 + 1 }} b{% set in_block = 1 %}{% endset %}[{{ block }}]{{ in_block }} {% set empty %}{% endset %}{{ empty == "" }} {{ block is string }}
{% macro f(a, b=2, c="x" ~ b) %}{{ a }}{{ b }}{{ c }} {% endmacro %}{{ f(1) }}{{ f(1, 3) }}{{ f(b=5, a=4) }}{{ f() }}{{ f(1, c=0) }}{{ f(1)|upper }}{{ f(1, nothing) }}{{ f(1, b=none) }}
{% set v = "late" %}{% macro g() %}{{ v }}{{ later }}{{ x }}{% endmacro %}{% set later = "r" %}{{ g() }} {% for x in l %}{{ g() }}{% endfor %} {% macro h(i) %}{{ i }}{% if i > 0 %}{{ h(i - 1) }}{% endif %}{% endmacro %}{{ h(3) }}
{% filter upper %}abc {{ s }}{% endfilter %} {% filter replace("a", "b") %}aXa{% endfilter %} {% generation %}gen {{ s }}{% set gz = 1 %}{% endgeneration %}{{ gz }}|
{% set args = [1, 2] %}{% macro f(x, y, z=0) %}{{ x }}{{ y }}{{ z }}{% endmacro %}{{ f(*args) }}{{ f(0, *args) }}{{ [f][0](1, 2) }}
{% if e %}1{% elif n %}2{% elif t %}3{% else %}4{% endif %} {% if e %}1{% elif n %}2{% else %}4{% endif %} {%if t%}tight{%endif%}
{{ (1 if nothing is undefined else 2) }} {{ 2 * 3 % 4 }} {{ 2 + 3 ~ 4 * 2 }} {{ 1 - 2 - 3 }} {{ 7 % 3 * 2 }} {{ true + 1 }} {{ "a" in "abc" and "d" not in "abc" or false }} {{ not true or true }}
{{ {1: "a", 2: "b"}[2] }} {{ {1: "a"} }} {{ {2: "b", 1: "a"}|dictsort }}
{{ d is mapping and d is iterable and d is not string }} {{ s|replace("l", "L")|length }} {{ (s ~ "<")|safe + "<" }} {{ "x" ~ ("<"|safe) + "<" }}
{{ "1"|int }} {{ 1|int }} {{ "many"|int }} {{ {"a": {"b": [1, "x"]}}|tojson(indent=4) }}
"""

# jinja2 renders these (or refuses them for another reason), and chat templates do not use them. The server refuses them.
REFUSED = r"""
{{ a * f }}
{{ 7 / 2 }}
{{ 7 // 2 }}
{{ -7 // 2 }}
{{ 2 ** 10 }}
{{ 2 ** -1 }}
{{ 2 ** 3 ** 2 }}
{{ -2 ** 2 }}
{{ 7.5 // 2 }}
{{ -7.5 % 2 }}
{{ 1 + 2 * 3 - 4 / 2 }}
{{ +a }}
{{ 1.0 }}
{{ 1e3 }}
{{ 1_000 }}
{{ big * 10.0 }}
{{ big * 100.0 }}
{{ 0.1 + 0.2 }}
{{ 1e-4 }}
{{ 1e16 }}
{{ "a" ~ 1 ~ none ~ true ~ 1.5 ~ [1] }}
{{ [0] * 3 }}
{{ 1 == 1.0 }}
{{ {"a": 1} == {"a": 1.0} }}
{{ 1 < 2 < 3 }}
{{ 1 < 3 < 2 }}
{{ [1, 2] < [1, 3] }}
{{ 1 <= 1.5 }}
{{ nested.1.1.0 }}
{{ l.0 }}
{{ [1, "a", none, true, 1.5, [2], (3,), {"k": "v"}] }}
{{ 1, 2 }}
{{ {1: 2, 1.0: 3} }}
{{ "\U0001f600\u00c5"|lower }}
{{ s.title() }}
{{ "AbC".swapcase() }}
{{ "they're bill's".title() }}
{{ "a,b,c".rsplit(",", 1) }}
{{ w.split() }}
{{ " a b c ".split(none, 1) }}
{{ "".split() }}
{{ "aXbX".rsplit("X") }}
{{ "a\nb\r\nc\n".splitlines() }}
{{ "a\nb".splitlines(true) }}
{{ "".splitlines() }}
{{ "\n".splitlines() }}
{{ "a\x0bb\u2028c".splitlines()|length }}
{{ "a=b=c".partition("=") }}
{{ "a=b=c".rpartition("=") }}
{{ "abc".partition("=") }}
{{ "abc".rpartition("=") }}
{{ s.endswith(("x", "world")) }}
{{ s.removeprefix("hello ") }}
{{ s.removesuffix("x") }}
{{ s.removesuffix("d") }}
{{ s.find("o") }}
{{ s.rfind("o") }}
{{ s.find("zz") }}
{{ u.find("x") }}
{{ s.index("w") }}
{{ s.count("l") }}
{{ s.count("") }}
{{ [1, 1, 2].count(1) }}
{{ l.index(2) }}
{{ s.replace("o", "0", 1) }}
{{ s.replace("", "-") }}
{{ u.replace("", "-", 2) }}
{{ "-".join(m) }}
{{ ", ".join("abc") }}
{{ "".join([]) }}
{{ "5".isdigit() }}
{{ "".isdigit() }}
{{ "ab1".isalnum() }}
{{ "ab1".isalpha() }}
{{ " ".isspace() }}
{{ "AB1".isupper() }}
{{ "12".isupper() }}
{{ "aB".islower() }}
{{ "ab".ljust(4, ".") }}
{{ "ab".rjust(5) }}
{{ "ab".center(5, "*") }}
{{ "abc".center(6, "*") }}
{{ "abc".center(2) }}
{{ "{1}{0}{x}{{}}".format(1, 2, x=3) }}
{{ "%s is %d%%" % ("a", 5.9) }}
{{ "%s" % "x" }}
{{ "%r" % "x" }}
{{ html|e }}
{{ html|escape }}
{{ (html|e)|e }}
{{ -5|abs }}
{{ (-5)|abs }}
{{ -2.5|abs }}
{{ {"b": 2, "a": 3, "C": 1}|dictsort(true) }}
{{ {"b": 2, "a": 3}|dictsort(by="value") }}
{{ {"b": 2, "a": 3}|dictsort(false, "key", true) }}
{{ "3.7"|float }}
{{ "x"|float }}
{{ "x"|float(1.5) }}
{{ 3|float }}
{{ "3.9"|int }}
{{ "x"|int(-1) }}
{{ 3.9|int }}
{{ -3.9|int }}
{{ " 7 "|int }}
{{ "1e2"|int }}
{{ "a\n\nb"|indent(2, blank=true) }}
{{ "a\nb"|indent("> ") }}
{{ users|join(", ", attribute="name") }}
{{ users|map(attribute="on", default="?")|list }}
{{ l|max }}
{{ m|max }}
{{ m|min(true) }}
{{ users|max(attribute="age") }}
{{ []|max }}
{{ [1, 2, 3, 4]|reject("odd")|list }}
{{ [1, 2, 3, 4]|select("odd")|list }}
{{ l|select("gt", 1)|list }}
{{ none|select("odd")|list }}
{{ l|reverse|list }}
{{ s|reverse }}
{{ 2.5|round }}
{{ 3.5|round }}
{{ 2.675|round(2) }}
{{ 42.55|round(1, "floor") }}
{{ 42.1|round(method="ceil") }}
{{ 42.55|round|int }}
{{ 7|round }}
{{ -2.5|round }}
{{ m|sort(case_sensitive=true) }}
{{ l|sort(reverse=true) }}
{{ users|sort(attribute="name", reverse=true)|map(attribute="name")|list }}
{{ l|sum }}
{{ users|sum(attribute="age") }}
{{ [0.5, 1]|sum(start=2) }}
{{ []|sum }}
{{ "\x01\x7f\b\f\r/"|tojson }}
{{ 1e22|tojson }}
{{ 1.0|tojson }}
{{ {1: 2, none: 3, true: 4, 1.5: 5}|tojson }}
{{ {"b": 1, "a": 2}|tojson(sort_keys=true) }}
{{ [1, [2]]|tojson(indent="--") }}
{{ ["a", "A"]|unique(true)|list }}
{{ users|unique(attribute="age")|map(attribute="name")|list }}
{{ s|wordcount }}
{{ s|replace("l", "L", 2) }}
{{ range is callable }}
{{ 6 is divisibleby 3 }}
{{ 6 is divisibleby(4) }}
{{ 4 is even }}
{{ 3 is odd }}
{{ a is gt 4 }}
{{ a is ge 5 }}
{{ a is lt 5 }}
{{ a is le 5 }}
{{ a is lessthan 6 }}
{{ a is greaterthan 6 }}
{{ range(3) is sequence }}
{{ d.keys() is sequence }}
{{ "abc" is lower }}
{{ "ABC" is upper }}
{{ "upper" is filter }}
{{ "nope" is filter }}
{{ "odd" is test }}
{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.depth0 }}{{ loop.previtem }}{{ loop.nextitem }} {% endfor %}
{% for a, (b, c) in [(1, (2, 3)), [4, [5, 6]]] %}{{ a }}{{ b }}{{ c }} {% endfor %} {% for k, v in d|dictsort %}{{ k }}{% endfor %}
{% for x in l %}{% for y in m %}{{ loop.index }}{{ loop.depth }} {% endfor %}{{ loop.index }}{% endfor %} {% for r in l %}{{ loop.cycle("odd", "even") }} {% endfor %} {% for r in [1, 1, 2] %}{{ loop.changed(r) }} {% endfor %}
{% for x in nested recursive %}[{{ loop(x) if x is iterable else x }}{{ loop.depth }}]{% endfor %}
{{ range(3)|list }} {{ range(1, 4)|list }} {{ range(5, 0, -2)|list }} {{ range(3)[1] }} {{ range(0)|length }} {% for i in range(2) %}{{ i }}{% endfor %}
{% set x = 1 %}{% for y in l %}{% set x = x + y %}{{ x }} {% endfor %}{{ x }} {% if t %}{% set x = 9 %}{% endif %}{{ x }} {% set a, b = 1, 2 %}{{ a }}{{ b }} {% set (p, q) = [3, 4] %}{{ p }}{{ q }} {% for i in l %}{% set inner = i %}{% endfor %}{{ inner }}|
{% set ns = namespace(x=0, y="s") %}{% for y in l %}{% set ns.x = ns.x + y %}{% endfor %}{{ ns.x }}{{ ns.y }}{{ ns.z }}| {% set ns.z = [1] %}{{ ns.z }} {% set n2 = namespace({"k": 1}, j=2) %}{{ n2.k + n2.j }} {% set n2.a, n2.b = 7, 8 %}{{ n2.a }}{{ n2.b }}
{% set block %}a {{ 1 + 1 }} b{% endset %}[{{ block }}] {% set block | upper | replace("A", "x") %}a{% endset %}[{{ block }}] {% set empty %}{% endset %}{{ empty == "" }} {{ block is string }}
{% macro f(a, b=2, c="x" ~ b) %}{{ a }}{{ b }}{{ c }} {% endmacro %}{{ f(1) }}{{ f(1, 3) }}{{ f(b=5, a=4) }}{{ f() }}{{ f(1, c=0) }}{{ f(1)|upper }}{{ f is callable }}
{% macro outer(x) %}{% macro inner(y) %}{{ x }}{{ y }}{% endmacro %}{{ inner(2) }}{{ inner(3) }}{% endmacro %}{{ outer(1) }} {% set v = "late" %}{% macro g() %}{{ v }}{{ later }}{% endmacro %}{% set later = "r" %}{{ g() }} {% macro h(i) %}{{ i }}{% if i > 0 %}{{ h(i - 1) }}{% endif %}{% endmacro %}{{ h(3) }}
{% macro wrap(tag) %}<{{ tag }}>{{ caller() }}</{{ tag }}>{% endmacro %}{% call wrap("b") %}bold {{ s }}{% endcall %} {% macro each(items) %}{% for i in items %}{{ caller(i, loop.index) }}{% endfor %}{% endmacro %}{% call(x, y=0) each(l) %}{{ x }}-{{ y }} {% endcall %}
{% filter upper %}abc {{ s }}{% endfilter %} {% filter replace("a", "b") | upper %}aXa{% endfilter %} {% with %}{% set z = 1 %}{{ z }}{% endwith %}{{ z }}| {% with a = 1, b = a + 1 %}{{ a }}{{ b }}{% endwith %} {{ a }} {% generation %}gen {{ s }}{% set gz = 1 %}{% endgeneration %}{{ gz }}|
{{ dict(a=1, b=2) }}
{{ dict([("a", 1)]) }}
{{ dict({"a": 1}, b=2) }}
{{ (dict(a=1)).a }} {% set args = [1, 2] %}{% macro f(x, y, z=0) %}{{ x }}{{ y }}{{ z }}{% endmacro %}{{ f(*args) }}{{ f(*args, **{"z": 3}) }}
{% if e %}1{% elif n %}2{% elif t %}3{% else %}4{% endif %} {% if e %}1{% elif n %}2{% else %}4{% endif %} {% if 1, %}tuple{% endif %} {%if t%}tight{%endif%}
{{ -a|abs }}
"""


def split_cases():
    """Yields the cases. A line is a case, except for the cases with line breaks: `joined` has how each of them begins, and
    its number of lines."""
    lines = CASES.strip("\n").split("\n")
    joined = {"  {% if t %}": 4, "   {%+ if t %}": 3, '{{ "b" -}}': 5, "{% if t %}": 1}
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
