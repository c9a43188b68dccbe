"""Pictures of cats, and of things that are not cats, each drawn from the dice it is handed.

An animal is a list of strokes in its own coordinates: x to the right, y down, about -1 to 1, the face in the
upper half. The pen puts them on the canvas moved, scaled and tilted. All is drawn four times too large and
shrunk, which is what makes the edges soft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

PHOTO_PIXELS = 64
_ZOOM = 4
_CANVAS = PHOTO_PIXELS * _ZOOM

Colour = tuple[int, int, int]
Point = tuple[float, float]

_COATS: tuple[Colour, ...] = (
    (222, 140, 66), (240, 178, 108), (120, 112, 110), (158, 150, 146), (58, 52, 56), (232, 220, 200),
    (128, 88, 60), (184, 132, 92), (206, 178, 148), (146, 106, 84), (96, 84, 92), (246, 240, 232),
)  # fmt: skip
_IRISES: tuple[Colour, ...] = (
    (132, 196, 84),
    (240, 196, 60),
    (92, 176, 220),
    (214, 150, 50),
    (110, 200, 170),
)
_BRIGHTS: tuple[Colour, ...] = ((214, 60, 64), (64, 120, 206), (250, 190, 60), (80, 160, 96), (170, 92, 184))
_PASTELS: tuple[Colour, ...] = (
    (188, 214, 232), (214, 228, 190), (244, 214, 196), (226, 204, 232), (246, 232, 190), (190, 224, 214),
    (150, 176, 206), (206, 164, 148), (168, 190, 148), (132, 140, 164),
)  # fmt: skip
_PINK: Colour = (240, 150, 156)
_INK: Colour = (40, 32, 36)
_WHITE: Colour = (252, 250, 246)


def mix(one: Colour, other: Colour, share: float) -> Colour:
    """`one` with `share` of `other` stirred in."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(one, other, strict=True))
    return red, green, blue


def bow(start: Point, pull: Point, end: Point, pieces: int = 14) -> list[Point]:
    """A line from `start` to `end`, drawn towards `pull` on its way."""
    points = []
    for i in range(pieces + 1):
        t = i / pieces
        a, b, c = (1 - t) ** 2, 2 * t * (1 - t), t * t
        points.append(
            (a * start[0] + b * pull[0] + c * end[0], a * start[1] + b * pull[1] + c * end[1]),
        )
    return points


@dataclass(frozen=True)
class Pen:
    """Draws in the animal's coordinates; what it draws is the foreground, and `mask` remembers where."""

    canvas: Image.Image
    mask: Image.Image
    centre: Point
    scale: float
    tilt: float
    squeeze: float

    def _place(self, points: Sequence[Point]) -> list[Point]:
        cos, sin = math.cos(self.tilt), math.sin(self.tilt)
        placed = []
        for x, y in points:
            wide = x * self.squeeze
            placed.append(
                (
                    self.centre[0] + self.scale * (wide * cos - y * sin),
                    self.centre[1] + self.scale * (wide * sin + y * cos),
                )
            )
        return placed

    def shape(self, points: Sequence[Point], fill: Colour, edge: Colour | None = None) -> None:
        """A filled polygon, with an outline when `edge` is given."""
        corners = self._place(points)
        for image, inside, border in ((self.canvas, fill, edge), (self.mask, 255, 255)):
            draw = ImageDraw.Draw(image)
            draw.polygon(corners, fill=inside)
            if edge is not None:
                # Rounding the joints costs more than all the rest; only sharp corners show it.
                joint = "curve" if len(corners) < 16 else None
                draw.line([*corners, *corners[:2]], fill=border, width=5, joint=joint)

    def blob(
        self, at: Point, radii: Point, fill: Colour, edge: Colour | None = None, *, turn: float = 0
    ) -> None:
        """A filled ellipse, turned by `turn` radians."""
        cos, sin = math.cos(turn), math.sin(turn)
        points = []
        for i in range(36):
            along, across = radii[0] * math.cos(i * math.pi / 18), radii[1] * math.sin(i * math.pi / 18)
            points.append((at[0] + along * cos - across * sin, at[1] + along * sin + across * cos))
        self.shape(points, fill, edge)

    def line(self, points: Sequence[Point], width: float, fill: Colour, edge: Colour | None = None) -> None:
        """A line `width` thick with round ends, and an outline when `edge` is given."""
        path = self._place(points)
        strokes = [(edge, width * self.scale + 10)] if edge is not None else []
        for colour, thick in [*strokes, (fill, width * self.scale)]:
            for image, ink in ((self.canvas, colour), (self.mask, 255)):
                draw = ImageDraw.Draw(image)
                draw.line(path, fill=ink, width=max(2, round(thick)), joint="curve")
                for end_x, end_y in (path[0], path[-1]):
                    r = thick / 2
                    draw.ellipse((end_x - r, end_y - r, end_x + r, end_y + r), fill=ink)


@dataclass(frozen=True)
class Coat:
    """An animal's colours, all from the one of its fur."""

    fur: Colour
    edge: Colour
    dark: Colour
    light: Colour

    @classmethod
    def roll(cls, dice: Random) -> Coat:
        """Cats, dogs and rabbits wear the same coats, so that colour tells nothing."""
        fur = dice.choice(_COATS)
        light = mix(fur, _WHITE, dice.uniform(0.3, 0.8))
        return cls(fur, mix(fur, _INK, 0.6), mix(fur, _INK, 0.38), light)


def _background(dice: Random) -> Image.Image:
    """A room, a meadow, a plain wall or a dotted paper."""
    top = dice.choice(_PASTELS)
    floor = mix(dice.choice(_PASTELS), (96, 84, 72), dice.uniform(0.1, 0.5))
    horizon = dice.uniform(0.55, 0.85) * _CANVAS
    canvas = Image.new("RGB", (_CANVAS, _CANVAS))
    draw = ImageDraw.Draw(canvas)
    for row in range(_CANVAS):
        draw.line((0, row, _CANVAS, row), fill=mix(top, _WHITE, 0.45 * (1 - row / _CANVAS)))
    match dice.choice(("room", "meadow", "wall", "dots")):
        case "room":
            draw.rectangle((0, horizon, _CANVAS, _CANVAS), fill=floor)
            draw.rectangle((0, horizon - 4, _CANVAS, horizon + 4), fill=mix(floor, _WHITE, 0.5))
            x, y, side = dice.uniform(-20, 200), dice.uniform(0, 60), dice.uniform(40, 80)
            draw.rectangle((x, y, x + side, y + side), fill=(214, 236, 248), outline=_WHITE, width=7)
            draw.line((x + side / 2, y, x + side / 2, y + side), fill=_WHITE, width=5)
        case "meadow":
            grass = mix((120, 176, 88), floor, dice.uniform(0, 0.4))
            draw.ellipse((-90, horizon - 24, _CANVAS + 90, _CANVAS * 1.6), fill=grass)
            for _ in range(40):
                x, y = dice.uniform(0, _CANVAS), dice.uniform(horizon, _CANVAS)
                draw.line((x, y, x + dice.uniform(-5, 5), y - 12), fill=mix(grass, _INK, 0.2), width=3)
            for _ in range(dice.randrange(7)):
                x, y = dice.uniform(0, _CANVAS), dice.uniform(horizon, _CANVAS)
                draw.ellipse((x - 5, y - 5, x + 5, y + 5), fill=dice.choice((_WHITE, *_BRIGHTS)))
        case "dots":
            dot, step = mix(top, dice.choice((_WHITE, _INK)), 0.3), dice.choice((32, 43, 64))
            for column in range(0, _CANVAS + step, step):
                for row in range(0, _CANVAS + step, step):
                    x, y = column + step // 2 * (row // step % 2), row
                    draw.ellipse((x - 6, y - 6, x + 6, y + 6), fill=dot)
        case _:
            draw.rectangle((0, horizon, _CANVAS, _CANVAS), fill=mix(floor, top, 0.5))
    return canvas


def _whiskers(pen: Pen, dice: Random, fur: Colour, reach: float, thick: float = 0.022) -> None:
    colour = _WHITE if sum(fur) < 420 else mix(_INK, fur, 0.25)
    droop = dice.uniform(-0.06, 0.1)
    for side in (-1, 1):
        for row in (-1, 0, 1):
            y = -0.03 + 0.055 * row
            end = (side * reach * dice.uniform(0.92, 1.08), y + 0.11 * row + droop)
            pen.line(bow((side * 0.15, y), (side * reach / 2, y + 0.03 * row - 0.02), end), thick, colour)


def _collar(pen: Pen, dice: Random, coat: Coat) -> None:
    pen.line(bow((-0.27, 0.17), (0, 0.32), (0.27, 0.17)), 0.085, dice.choice(_BRIGHTS), coat.edge)
    pen.blob((0, 0.31), (0.065, 0.065), (250, 206, 80), coat.edge)


def _body(pen: Pen, coat: Coat) -> None:
    for side in (-1, 1):
        pen.blob((side * 0.3, 0.78), (0.24, 0.22), coat.fur, coat.edge)
    pen.blob((0, 0.56), (0.4, 0.44), coat.fur, coat.edge)
    pen.blob((0, 0.55), (0.22, 0.32), coat.light)
    for side in (-1, 1):
        pen.blob((side * 0.17, 0.93), (0.14, 0.09), coat.light, coat.edge)


def _eyes(pen: Pen, dice: Random, apart: float, y: float) -> None:
    """Round dark eyes, as dogs and rabbits have them."""
    size, brown = dice.uniform(0.07, 0.095), mix(_INK, (110, 70, 40), dice.uniform(0, 0.5))
    for side in (-1, 1):
        pen.blob((side * apart, y), (size, size * 1.15), brown, _INK)
        pen.blob((side * apart - 0.025, y - 0.035), (0.03, 0.03), _WHITE)


def _smile(pen: Pen, y: float, width: float) -> None:
    for side in (-1, 1):
        pen.line(bow((0, y), (side * width * 0.5, y + 0.1), (side * width, y)), 0.028, _INK)


def draw_cat(pen: Pen, dice: Random) -> None:
    """Pointed ears, whiskers, slit eyes and a long tail."""
    coat = Coat.roll(dice)
    pattern = dice.choice(("plain", "tabby", "tabby", "patched", "masked"))
    side = dice.choice((-1, 1))
    _cat_tail(pen, dice, coat, pattern, side)
    _body(pen, coat)
    if pattern == "tabby":
        for s in (-1, 1):
            for y in (0.42, 0.56, 0.7):
                pen.line(bow((s * 0.37, y), (s * 0.3, y + 0.03), (s * 0.22, y)), 0.05, coat.dark)
    if dice.random() < 0.4:
        _collar(pen, dice, coat)
    _cat_ears(pen, dice, coat, pattern)
    pen.blob((0, -0.22), (0.54, dice.uniform(0.4, 0.45)), coat.fur, coat.edge)
    _cat_markings(pen, coat, pattern, side)
    _cat_eyes(pen, dice)
    for s in (-1, 1):
        pen.blob((s * 0.085, -0.01), (0.125, 0.1), coat.light)
    pen.shape([(-0.07, -0.12), (0.07, -0.12), (0, -0.04)], _PINK, mix(_PINK, _INK, 0.4))
    _smile(pen, 0.0, 0.13)
    _whiskers(pen, dice, coat.fur, dice.uniform(0.66, 0.84))


def _cat_tail(pen: Pen, dice: Random, coat: Coat, pattern: str, side: int) -> None:
    end = (side * dice.uniform(0.62, 0.95), dice.uniform(-0.1, 0.35))
    tail = bow((side * 0.3, 0.86), (side * dice.uniform(1.0, 1.25), 0.9), end)
    pen.line(tail, 0.15, coat.fur, coat.edge)
    if pattern != "plain":
        pen.line(tail[-4:], 0.15, coat.light if pattern == "patched" else coat.dark)


def _cat_ears(pen: Pen, dice: Random, coat: Coat, pattern: str) -> None:
    tip, top = dice.uniform(0.36, 0.47), -dice.uniform(0.84, 1.0)
    outer, inner = coat.dark if pattern == "masked" else coat.fur, mix(_PINK, coat.fur, 0.25)
    for s in (-1, 1):
        pen.shape([(s * 0.5, -0.28), (s * tip, top), (s * 0.06, -0.58)], outer, coat.edge)
        pen.shape([(s * 0.41, -0.42), (s * (tip - 0.03), top + 0.14), (s * 0.19, -0.56)], inner)


def _cat_markings(pen: Pen, coat: Coat, pattern: str, side: int) -> None:
    match pattern:
        case "tabby":
            for x in (-0.13, 0, 0.13):
                pen.line([(x, -0.6 + abs(x) * 0.25), (x * 0.8, -0.46)], 0.055, coat.dark)
            for s in (-1, 1):
                pen.line([(s * 0.5, -0.2), (s * 0.38, -0.17)], 0.045, coat.dark)
        case "patched":
            patch = coat.dark if sum(coat.fur) > 300 else coat.light
            pen.blob((side * 0.23, -0.34), (0.22, 0.2), patch)
        case "masked":
            pen.blob((0, -0.1), (0.34, 0.26), coat.dark)


def _cat_eyes(pen: Pen, dice: Random) -> None:
    if dice.random() < 0.1:  # asleep in the sun
        for s in (-1, 1):
            pen.line(bow((s * 0.32, -0.26), (s * 0.21, -0.17), (s * 0.1, -0.26)), 0.035, _INK)
        return
    iris, look, slit = dice.choice(_IRISES), dice.uniform(-0.02, 0.02), dice.uniform(0.03, 0.06)
    for s in (-1, 1):
        pen.blob((s * 0.22, -0.26), (0.115, 0.125), iris, _INK, turn=s * 0.25)
        pen.blob((s * 0.22 + look, -0.26), (slit, 0.105), _INK)
        pen.blob((s * 0.22 - 0.035, -0.31), (0.028, 0.028), _WHITE)


def draw_dog(pen: Pen, dice: Random) -> None:
    """Floppy ears, a snout with a big nose, often a tongue."""
    coat = Coat.roll(dice)
    side = dice.choice((-1, 1))
    wag = bow(
        (side * 0.3, 0.75), (side * 0.62, 0.75), (side * dice.uniform(0.55, 0.75), dice.uniform(0.3, 0.5))
    )
    pen.line(wag, 0.13, coat.fur, coat.edge)
    _body(pen, coat)
    if dice.random() < 0.6:
        _collar(pen, dice, coat)
    pen.blob((0, -0.27), (0.45, 0.44), coat.fur, coat.edge)
    if dice.random() < 0.5:
        pen.blob((side * 0.19, -0.34), (0.17, 0.2), dice.choice((coat.dark, coat.light)))
    _eyes(pen, dice, 0.19, -0.34)
    pen.blob((0, -0.05), (dice.uniform(0.25, 0.3), 0.21), coat.light, mix(coat.light, coat.edge, 0.4))
    if dice.random() < 0.6:
        pen.blob((0, 0.16), (0.085, 0.13), (236, 110, 120), mix(_PINK, _INK, 0.5))
    _smile(pen, 0.03, 0.15)
    pen.line([(0, -0.1), (0, 0.04)], 0.025, _INK)
    pen.blob((0, -0.15), (0.11, 0.08), _INK)
    pen.blob((-0.03, -0.175), (0.03, 0.02), (150, 140, 145))
    drop, lean = dice.uniform(0.3, 0.42), dice.uniform(0.1, 0.4)
    ear = dice.choice((coat.dark, mix(coat.fur, coat.edge, 0.4), coat.fur))
    for s in (-1, 1):
        pen.blob((s * 0.45, -0.5 + drop * 0.8), (0.16, drop), ear, coat.edge, turn=-s * lean)


def draw_rabbit(pen: Pen, dice: Random) -> None:
    """Long round ears, two teeth, a tail like a ball; short whiskers too, so that whiskers say little."""
    coat = Coat.roll(dice)
    side = dice.choice((-1, 1))
    pen.blob((side * 0.46, 0.8), (0.16, 0.15), coat.light, coat.edge)
    _body(pen, coat)
    long, lean, bent = dice.uniform(0.34, 0.44), dice.uniform(0.05, 0.35), dice.random() < 0.25
    for s in (-1, 1):
        x, y = s * (0.19 + 0.3 * lean), -0.42 - long * 0.9
        pen.blob((x, y), (0.125, long), coat.fur, coat.edge, turn=s * lean)
        pen.blob((x, y + 0.03), (0.06, long * 0.75), mix(_PINK, coat.fur, 0.2), turn=s * lean)
        if bent and s == side:
            pen.blob((x + s * 0.17, y - long * 0.7), (0.22, 0.11), coat.fur, coat.edge, turn=s * 0.6)
    pen.blob((0, -0.18), (0.45, 0.4), coat.fur, coat.edge)
    _eyes(pen, dice, 0.23, -0.24)
    for s in (-1, 1):
        pen.blob((s * 0.3, -0.04), (0.09, 0.06), mix(coat.fur, _PINK, 0.5))
        pen.blob((s * 0.08, 0.0), (0.11, 0.09), coat.light)
    pen.shape(
        [(-0.05, 0.04), (0.05, 0.04), (0.045, 0.15), (-0.045, 0.15)], _WHITE, mix(coat.edge, coat.fur, 0.3)
    )
    pen.blob((0, -0.08), (0.055, 0.04), mix(_PINK, _INK, 0.1))
    _smile(pen, 0.0, 0.11)
    if dice.random() < 0.5:
        _whiskers(pen, dice, coat.fur, dice.uniform(0.45, 0.6))


def draw_thing(pen: Pen, dice: Random) -> None:
    """A circle, triangle, square or star that would like to be a cat: it has eyes, or lines like whiskers."""
    fill = dice.choice((*_BRIGHTS, *_COATS))
    edge = mix(fill, _INK, 0.55)
    size = dice.uniform(0.6, 0.85)
    corners, inner = dice.choice(((40, 1.0), (3, 1.0), (4, 1.0), (5, 0.5), (6, 1.0)))
    turn = dice.uniform(-0.4, 0.4) + (math.pi / 4 if corners == 4 else 0)
    points = []
    for i in range(2 * corners):
        angle = turn - math.pi / 2 + i * math.pi / corners
        # Between two corners: their middle on a straight side, or further in for a star.
        radius = size * (1.0 if i % 2 == 0 else inner * (1.0 if inner < 1 else math.cos(math.pi / corners)))
        points.append((radius * math.cos(angle), radius * math.sin(angle)))
    pen.shape(points, fill, edge)
    for _ in range(dice.randrange(4)):
        x, y, r = dice.uniform(-0.25, 0.25), dice.uniform(-0.2, 0.3), dice.uniform(0.04, 0.1)
        pen.blob((x, y), (r, r), mix(fill, _WHITE, 0.4))
    if dice.random() < 0.75:
        _eyes(pen, dice, dice.uniform(0.12, 0.2), -0.14)
    if dice.random() < 0.3:
        _smile(pen, 0.12, 0.14)
    if dice.random() < 0.7:
        _whiskers(pen, dice, fill, dice.uniform(0.5, 0.95))


def _as_photo(canvas: Image.Image, mask: Image.Image, dice: Random) -> Image.Image:
    """Light from one side, fur where the animal is, grain everywhere, shrunk to the photo's size."""
    size = (PHOTO_PIXELS, PHOTO_PIXELS)
    pixels = np.asarray(canvas.resize(size, Image.Resampling.BOX), dtype=np.float32)
    inside = np.asarray(mask.resize(size, Image.Resampling.BOX), dtype=np.float32)[..., None] / 255
    noise = np.random.Generator(np.random.PCG64(dice.getrandbits(64)))
    # Hair lies along the body: grain drawn out downwards looks like it, grain alone looks like a bad camera.
    hair = noise.normal(0, 1, (PHOTO_PIXELS + 2, PHOTO_PIXELS, 1))
    hair = hair[:-2] + hair[1:-1] + hair[2:]
    across, down = np.meshgrid(np.linspace(-1, 1, PHOTO_PIXELS), np.linspace(-1, 1, PHOTO_PIXELS))
    slope = dice.uniform(-10, 10) * across - dice.uniform(0, 12) * down
    grain = noise.normal(0, dice.uniform(1.0, 4.0), (PHOTO_PIXELS, PHOTO_PIXELS, 1))
    lit = pixels * dice.uniform(0.88, 1.08) + slope[..., None]
    lit += inside * hair * dice.uniform(1.5, 5.0) + grain
    return Image.fromarray(np.clip(lit, 0, 255).astype(np.uint8))


_PAINTERS = {"cat": draw_cat, "dog": draw_dog, "rabbit": draw_rabbit, "thing": draw_thing}


def paint(kind: str, dice: Random) -> Image.Image:
    """One photo of a `kind`: "cat", "dog", "rabbit" or "thing"."""
    canvas = _background(dice)
    mask = Image.new("L", canvas.size, 0)
    x = _CANVAS * dice.uniform(0.42, 0.58)
    y = _CANVAS * (dice.uniform(0.46, 0.55) + (0.07 if kind == "rabbit" else 0))  # room for the ears
    scale = _CANVAS * dice.uniform(0.31, 0.42)
    shadow = Image.new("L", canvas.size, 0)
    feet = y + 0.95 * scale
    ImageDraw.Draw(shadow).ellipse((x - 0.62 * scale, feet - 14, x + 0.62 * scale, feet + 18), fill=90)
    canvas.paste(_INK, mask=shadow.filter(ImageFilter.GaussianBlur(7)))
    _PAINTERS[kind](Pen(canvas, mask, (x, y), scale, dice.gauss(0, 0.14), dice.uniform(0.9, 1.1)), dice)
    return _as_photo(canvas, mask, dice)
