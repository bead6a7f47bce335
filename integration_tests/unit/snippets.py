"""Our own snippets for fingerprints, each valid from Python 3.10 on, and the fingerprint each must have everywhere."""

from __future__ import annotations

#: Name to source; the fingerprints are in `PINNED`.
SNIPPETS: dict[str, str] = {
    "plain": ("def f(a, b=2, *, c, **d):\n    return a + b - c * d['e']\n"),
    "star_args": ("def f(a, /, b, *args, c=None, **kwargs):\n    return g(*args, a, b=b, **kwargs)\n"),
    "hints": (
        "def f(a: int | None = 3, *b: 'str') -> list[dict[str, int]]:\n    x: int = a or 0\n    return [{'x': x}]\n"
    ),
    "decorated": ("@first\n@second(3, key='v')\ndef f(self):\n    return self.x\n"),
    "async": (
        "async def f(s):\n"
        "    async with s as t, u:\n"
        "        async for x in t:\n"
        "            await g(x)\n"
        "    return [y async for y in t]\n"
    ),
    "lambda": ("def f():\n    return (lambda a, b=1, *c, **d: a if b else c)\n"),
    "walrus": ("def f(xs):\n    while (n := len(xs)) > 10:\n        xs = xs[n // 2 :]\n    return n\n"),
    "match": (
        "def f(c):\n"
        "    match c:\n"
        "        case {'k': [1, *rest], **more} if rest:\n"
        "            return more\n"
        "        case Point(x=0, y=y) | Line(y, _):\n"
        "            return y\n"
        "        case 'a' | None | -1:\n"
        "            return 2\n"
        "        case _:\n"
        "            return 3\n"
    ),
    "fstring": ("def f(x, w):\n    return f'{x!r:>{w}}|{x:%H:%M}|{{literal}} {x.y[\"k\"]} {x=} end'\n"),
    "fstring_concat": ("def f(x):\n    return 'a' f'{x}b' \"c\" f'{{}}' f'{x!s}{x}' 'd'\n"),
    "fstring_nested": ("def f(x):\n    return f'''{ {1: 2}[x] }{(lambda: 1)()}{f\"{x}\"}{x:{{}}}\\n{x:\\x41}'''\n"),
    "fstring_empty": ("def f(x):\n    return f'', f'a', f'{x:}', '' f'{x}'\n"),
    "strings": ("def f():\n    return 'a' 'b' \"c\" '''d\ne''', r'\\d', b'\\x00a' b'b', u'v'\n"),
    "unicode": ("def \xfcber(\u03b1):\n    return '\xe9\u4e2d\U0001f600\u0378', \u03b1, '\\ud800'\n"),
    "numbers": ("def f():\n    return 0x10, 1_000, 1e300, 0.1, 3j, -2, 10**50, 123456789012345678901234567890, 1.0\n"),
    "class": (
        "class A(B, metaclass=M):\n"
        "    x: int = 1\n"
        "    y = z = 2\n"
        "\n"
        "    @property\n"
        "    def p(self):\n"
        "        return self.x\n"
        "\n"
        "    class Inner:\n"
        "        def g(self): ...\n"
    ),
    "control": (
        "def f(a):\n"
        "    for i, (j, *k) in enumerate(a):\n"
        "        if i % 2 == 0 and not j:\n"
        "            continue\n"
        "        elif j in k:\n"
        "            break\n"
        "    else:\n"
        "        del a[1:2, ...]\n"
        "    try:\n"
        "        raise E from None\n"
        "    except (X, Y) as e:\n"
        "        pass\n"
        "    finally:\n"
        "        a @= 1\n"
    ),
    "scopes": (
        "def f():\n"
        "    global g\n"
        "    h = 1\n"
        "    def i():\n"
        "        nonlocal h\n"
        "        h += 1\n"
        "        yield from j\n"
        "    return i\n"
    ),
    "imports": (
        "def f():\n    from . import a as b\n    from ..c.d import e\n    import g.h as i, j\n    assert a, 'm'\n"
    ),
    "comprehensions": (
        "def f(a):\n    return {k: v for k, v in a if k if v}, {x for y in a for x in y}, (*a, *a), {**a, 'b': 1}\n"
    ),
    "documented": (
        "class A:\n"
        "    'Class.'\n"
        "\n"
        "    def m(self):\n"
        "        '''Method.'''\n"
        "        def n():\n"
        '            "Inner."\n'
        "        return 'not a docstring'\n"
    ),
    "only_docstring": ("def f():\n    '''Nothing else.'''\n"),
    "conversion": ("def f(a):\n    return a < b <= c != d is not e, a if b else c, -a ** +b, ~a | b ^ c & d >> 1\n"),
}

#: Made on CPython 3.10.13 and equal on 3.11.7, 3.12.1 and 3.13.0.
PINNED: dict[str, str] = {
    "plain": "52820d3c68558dcd",
    "star_args": "ad9d8df492d96266",
    "hints": "1cfae7915bf75dfb",
    "decorated": "bfe20fdc943c699a",
    "async": "878f960e6df5d205",
    "lambda": "1fb132cb329d064c",
    "walrus": "f747aa5f660dea46",
    "match": "a72c5205205875e3",
    "fstring": "4113497d65390af3",
    "fstring_concat": "f656497ee5e39f35",
    "fstring_nested": "c7a3e03482524284",
    "fstring_empty": "ed6b1929ce57db8e",
    "strings": "8c97a10871f59c24",
    "unicode": "48b2e7b1024a5190",
    "numbers": "6f4e64243f3a8929",
    "class": "db73c95b45112fd9",
    "control": "563e2dfde06acaf6",
    "scopes": "bae99f87e22bb9dc",
    "imports": "0271dc589707dfbb",
    "comprehensions": "ac06ef0d79f1d212",
    "documented": "268e451db660bd4a",
    "only_docstring": "2f7a8d60c8a73a7c",
    "conversion": "d002228e7058845b",
}
