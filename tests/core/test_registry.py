"""Things that a user names: one notation, checked options, errors of one line."""

import dataclasses
import json
import sys
from copy import deepcopy
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BeforeValidator, Field

from polytempo.core.errors import PolytempoError
from polytempo.core.registry import Options, Registry, parse
from polytempo.core.schedule import SCHEDULES
from polytempo.core.strategy import STRATEGIES, Strategy
from polytempo.simulation import DEVICES, DROPOUTS, NETWORKS
from polytempo.strategies import Attention, Complement, Likeness

SHAPES: Registry[Any] = Registry("shape")


class Shape(Options):
    """Base of what the tests name."""


@SHAPES.register("circle")
class Circle(Shape):
    radius: Annotated[float, Field(gt=0)] = 1.0
    fill: Literal["plain", "dotted"] = "plain"
    clip: float | None = 0.9
    label: str | None = None
    layers: tuple[int, ...] = (1, 2)
    visible: bool = True


@SHAPES.register("square-root")
class Square(Shape):
    side: int


class Ellipse(Circle):
    """A user's subclass that nobody has registered."""

    ratio: float = 2.0


class Drawing:
    class Inner(Shape):
        size: int = 3


class Named(Shape):
    """A user's class with a name of its own choice, used by its path."""

    name = "named"
    size: int = 3


class Handmade:
    """No options dataclass at all."""

    def __init__(self, size: int = 3) -> None:
        self.size = size


def error(action, *arguments) -> str:
    """The message of the error, which must be one line."""
    with pytest.raises(PolytempoError) as raised:
        action(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# -- notation --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "found"),
    [
        ("pace", "pace", {}),
        (" pace ", "pace", {}),
        ("pace:gamma=2", "pace", {"gamma": 2}),
        ("pace:gamma=2.5,reply=fresh", "pace", {"gamma": 2.5, "reply": "fresh"}),
        ("pace:gamma = 2 , reply = fresh", "pace", {"gamma": 2, "reply": "fresh"}),
        ("pace:lr=1e-3", "pace", {"lr": 0.001}),
        ("pace:a=-1.5", "pace", {"a": -1.5}),
        ("pace:multicast=false,buffer=true", "pace", {"multicast": False, "buffer": True}),
        ("pace:clip=null", "pace", {"clip": None}),
        ("pace:clip=none", "pace", {"clip": "none"}),  # `create` makes it no value
        ("pace:latency-ms=300", "pace", {"latency_ms": 300}),
        ("x:layers=[1,2,3]", "x", {"layers": [1, 2, 3]}),
        ("x:layers=[1,2],size=3,more=[4]", "x", {"layers": [1, 2], "size": 3, "more": [4]}),
        ("x:layers=[]", "x", {"layers": []}),
        ('x:label="quoted"', "x", {"label": "quoted"}),
        ("trace:path=/tmp/a b.csv", "trace", {"path": "/tmp/a b.csv"}),
        ("trace:path=C:/data.csv", "trace", {"path": "C:/data.csv"}),
        ("x:text=a=b", "x", {"text": "a=b"}),
        ("x:label=", "x", {"label": ""}),
        ("my.module:Class", "my.module:Class", {}),
        ("my.module:Class:a=1,b=x", "my.module:Class", {"a": 1, "b": "x"}),
        ("my.module:Class:path=C:/d", "my.module:Class", {"path": "C:/d"}),
    ],
)
def test_notation(text, name, found):
    assert parse(text) == (name, found)


@pytest.mark.parametrize(
    "text", ["x:a=1,b", "x:a=1,", "x:=3", "x:a=1,=2", "m:Class:b", "x:a=[1,2],b", "x:a=b,c"]
)
def test_what_cannot_be_read_is_quoted_with_the_notation(text):
    message = error(parse, text)
    assert repr(text) in message and "key=value" in message


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z_]{0,6}", fullmatch=True),
        st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.none()),
        min_size=1,
        max_size=4,
    )
)
def test_numbers_and_truth_values_survive_the_notation(given_options):
    text = "name:" + ",".join(f"{key}={json.dumps(v)}" for key, v in given_options.items())
    assert parse(text) == ("name", given_options)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x:a=[[1,2],[3,4]]", {"a": [[1, 2], [3, 4]]}),
        ('x:a={"k":1,"l":2},b=3', {"a": {"k": 1, "l": 2}, "b": 3}),
        ('x:a="b,c",d=1', {"a": "b,c", "d": 1}),
        ('x:a="b,c=d"', {"a": "b,c=d"}),
        ('x:a=["p,q=r"],b=2', {"a": ["p,q=r"], "b": 2}),
    ],
)
def test_commas_inside_json_values_do_not_end_an_option(text, found):
    assert parse(text) == ("x", found)


# -- making things ---------------------------------------------------------------------------------


def test_text_table_and_object_make_the_same_thing():
    expected = Circle(2.0, "dotted", None, layers=(3,))
    assert SHAPES.create("circle:radius=2,fill=dotted,clip=none,layers=[3]") == expected
    table = {"name": "circle", "radius": 2, "fill": "dotted", "clip": "none", "layers": [3]}
    kept = dict(table)
    assert SHAPES.create(table) == expected
    assert table == kept
    assert SHAPES.create(expected) is expected
    assert SHAPES.create("circle") == Circle() != expected


def test_registered_names_are_known_in_order_and_on_the_class():
    assert list(SHAPES) == ["circle", "frame", "square-root"]
    assert Circle.name == "circle" and SHAPES["circle"] is Circle


def test_an_unknown_name_is_answered_with_the_nearest_or_with_all():
    assert "no shape is called 'circel'; did you mean 'circle'?" in error(SHAPES.create, "circel")
    assert "choose from: circle, frame, square-root" in error(SHAPES.create, "xyz")
    assert "did you mean 'pace'" in error(STRATEGIES.create, "pac:gamma=1")


def test_an_unknown_option_is_answered_with_the_nearest_or_with_all():
    assert "shape circle: unknown option 'radios'; did you mean 'radius'?" in error(
        SHAPES.create, "circle:radios=2"
    )
    message = error(SHAPES.create, "circle:xyz=2")
    assert "unknown option 'xyz'; choose from: clip, fill, label" in message


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("circle:radius=big", ["radius", "'big'", "number"]),
        ("circle:radius=-1", ["radius", "greater than 0", "-1"]),
        ("circle:radius=none", ["radius", "None"]),
        ("circle:fill=striped", ["fill", "'striped'", "'plain'", "'dotted'"]),
        ("circle:layers=3", ["layers", "3"]),
        ("circle:visible=perhaps", ["visible", "'perhaps'"]),
        ({"name": "circle", "radius": "a\nb"}, ["radius", r"a\nb"]),
        ({"name": "circle", "layers": ["a", "b"]}, ["layers.0", "'a'"]),
        ("square-root:side=1.5", ["square-root", "side", "1.5"]),
        ("square-root", ["side", "equired"]),
    ],
)
def test_a_wrong_value_is_an_error_of_one_line_that_names_option_and_value(spec, named):
    message = error(SHAPES.create, spec)
    assert message.startswith("shape ")
    for part in named:
        assert part in message


def test_a_missing_option_is_said_to_be_missing_and_nothing_more():
    message = error(SHAPES.create, "square-root")
    assert "side" in message and "ArgsKwargs" not in message


def test_a_list_of_one_is_said_to_need_brackets():
    with pytest.raises(PolytempoError, match=r"steps: at is a list: write at=\[3\]$"):
        SCHEDULES.create("steps:at=3")


def test_an_option_without_a_value_is_not_taken_for_a_class_to_import():
    message = error(SHAPES.create, "circle:radius")
    assert "key=value" in message and "PYTHONPATH" not in message


def test_a_table_without_a_name_is_an_error_that_shows_it():
    message = error(SHAPES.create, {"radius": 3})
    assert "shape" in message and "'name'" in message and "'radius': 3" in message


def test_options_are_checked_in_python_too():
    with pytest.raises(ValueError, match="radius"):
        Circle(radius=-1)
    with pytest.raises(ValueError, match="radios"):
        Circle(radios=1)


# -- options of options ----------------------------------------------------------------------------


class Frame(Shape):
    """Its first option has options of its own."""

    shape: Annotated[Shape, BeforeValidator(SHAPES.create)] = dataclasses.field(
        default_factory=lambda: Circle(radius=2.0, clip=None)
    )
    width: int = 1


SHAPES.register("frame")(Frame)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("frame", Frame()),
        ("frame:shape.fill=dotted", Frame(Circle(2.0, "dotted", None))),
        ("frame:shape.clip=0.5,width=3", Frame(Circle(2.0, clip=0.5), 3)),
        ("frame:shape=circle", Frame(Circle())),
        ("frame:shape=circle,shape.radius=3", Frame(Circle(3.0))),
        ("frame:shape.radius=3,shape=circle", Frame(Circle(3.0))),  # in any order
        ("frame:shape=square-root,shape.side=4", Frame(Square(4))),
        ("frame:shape=circle,shape.clip=none,shape.layers=[]", Frame(Circle(clip=None, layers=()))),
        ('frame:shape={"name":"square-root","side":4}', Frame(Square(4))),
        ("frame:shape=frame,shape.shape.radius=5", Frame(Frame(Circle(5.0, clip=None)))),
        ({"name": "frame", "shape": {"name": "circle", "radius": 3}}, Frame(Circle(3.0))),
        ({"name": "frame", "shape": "square-root:side=4"}, Frame(Square(4))),
        (
            {"name": "frame", "shape": "circle:fill=dotted", "shape.radius": 3},
            Frame(Circle(3.0, "dotted")),
        ),
        ({"name": "frame", "shape": Square(4)}, Frame(Square(4))),
        # what TOML makes of `shape.fill = "dotted"`
        ({"name": "frame", "shape": {"fill": "dotted"}}, Frame(Circle(2.0, "dotted", None))),
    ],
    ids=str,
)
def test_options_of_an_option(spec, expected):
    kept = deepcopy(spec)
    made = SHAPES.create(spec)
    assert made == expected and type(made.shape) is type(expected.shape)
    assert spec == kept
    table = SHAPES.describe(made)
    assert json.loads(json.dumps(table)) == table
    assert SHAPES.create(table) == made


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("frame:shape=circel", "no shape is called 'circel'; did you mean 'circle'?"),
        ("frame:shape.radios=3", ":Circle: unknown option 'radios'; did you mean 'radius'?"),
        ("frame:shape=square-root", "shape square-root: the option 'side' is required"),
        ("frame:shape=circle,shape.radius=-1", "shape circle: radius: Input should be greater"),
        ("frame:shap.radius=1", "frame: unknown option 'shap.radius'; did you mean 'shape.radius'"),
        ("frame:width.radius=1", "frame: unknown option 'width.radius'"),
        ("frame:shape=none,shape.radius=1", "frame: unknown option 'shape.radius'"),
        ("circle:radius.x=1", "shape circle: unknown option 'radius.x'; did you mean 'radius'?"),
        ("frame:shape=none", "frame: shape: "),
        ("frame:shapes=circle", "frame: unknown option 'shapes'; did you mean 'shape'?"),
        ({"name": "frame", "width": {"fill": "dotted"}}, "frame: width: "),
    ],
    ids=str,
)
def test_a_mistake_in_the_options_of_an_option_names_the_nearest(spec, message):
    assert message in error(SHAPES.create, spec)


@pytest.mark.parametrize(
    ("spec", "graph"),
    [
        ("pace", Likeness()),
        ("pace:graph=fedamp,graph.sigma=5", Attention(sigma=5)),
        ("pace:graph.reference=model,omega=2", Likeness(reference="model")),
        ("pfedgraph", Likeness(clip=0.9)),
        ("pfedgraph:graph.gamma=2", Likeness(gamma=2, clip=0.9)),  # the default's clip stays
        ("pfedgraph:graph.clip=none", Likeness()),
        ("pfedgraph-async:graph.clip=0.8,graph.gamma=1", Likeness(gamma=1, clip=0.8)),
        ("fedamp:graph.self-weight=0.3", Attention(self_weight=0.3)),
        ("fedsac-pace:graph.k=5,graph.clip=none", Complement(k=5, clip=None)),
    ],
)
def test_strategies_take_the_options_of_their_graphs(spec, graph):
    made = STRATEGIES.create(spec)
    assert made.graph == graph and type(made.graph) is type(graph)
    again = STRATEGIES.create(STRATEGIES.describe(made))
    assert again == made and again.graph == graph


# -- a user's own ----------------------------------------------------------------------------------

OWN = """
from polytempo.core.strategy import Strategy

class Mine(Strategy):
    mixing: float = 0.5

class Plain:
    def __init__(self, size=3):
        self.size = size
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The name of a module of the user's."""
    (tmp_path / "polytempo_users_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "polytempo_users_own"
    sys.modules.pop("polytempo_users_own", None)


def test_a_class_of_the_users_is_made_by_its_path_and_comes_back_by_it(own):
    made = STRATEGIES.create(f"{own}:Mine:mixing=0.3")
    assert isinstance(made, Strategy) and made.mixing == 0.3
    assert STRATEGIES.create({"name": f"{own}:Mine"}).mixing == 0.5
    table = STRATEGIES.describe(made)
    assert table == {"name": f"{own}:Mine", "mixing": 0.3}
    assert STRATEGIES.create(table) == made
    assert "did you mean 'mixing'" in error(STRATEGIES.create, f"{own}:Mine:mixin=1")


def test_a_class_of_another_kind_is_refused_with_the_base_that_it_lacks(own):
    for other in (f"{own}:Plain", f"{own}:Plain:size=4", "math:sqrt"):
        message = error(STRATEGIES.create, other)
        assert "invalid strategy" in message and "polytempo.core.strategy:Strategy" in message
    assert "invalid device model" in error(DEVICES.create, f"{own}:Mine")


def test_where_no_base_is_asked_for_a_plain_class_works_and_its_mistakes_are_named(own):
    assert SHAPES.create(f"{own}:Plain:size=4").size == 4
    assert "sise" in error(SHAPES.create, f"{own}:Plain:sise=4")


def test_what_cannot_be_imported_is_named(own):
    assert f"'{own}:Nobody'" in error(STRATEGIES.create, f"{own}:Nobody")
    assert "'no_such_module:Mine'" in error(STRATEGIES.create, "no_such_module:Mine")


@pytest.mark.parametrize(
    "thing",
    [
        Circle(),
        Circle(radius=3, clip=None, label=None, layers=(), visible=False),
        Circle(clip=0.5, label="x", layers=(7, 8, 9), fill="dotted"),
        Square(4),
        Ellipse(),
        Ellipse(radius=2, clip=None, ratio=1.5, layers=(4,)),
    ],
    ids=repr,
)
def test_describe_then_create_is_an_equal_object(thing):
    table = SHAPES.describe(thing)
    made = SHAPES.create(table)
    assert made == thing and type(made) is type(thing)
    # a TOML file has neither null nor tuples
    assert all(v is not None and not isinstance(v, tuple) for v in table.values())


def test_a_class_inside_a_class_comes_back():
    thing = Drawing.Inner(5)
    assert SHAPES.create(SHAPES.describe(thing)) == thing


def test_a_name_that_nobody_registered_is_not_used_to_describe():
    thing = Named(5)
    assert SHAPES.create(SHAPES.describe(thing)) == thing


def test_description_names_our_classes_shortly_and_the_users_by_their_path():
    """In another process a user's registration may not have happened."""
    assert STRATEGIES.describe(STRATEGIES.create("pace"))["name"] == "pace"
    assert SHAPES.describe(Circle())["name"] == f"{__name__}:Circle"
    assert SHAPES.describe(Ellipse())["name"] == f"{__name__}:Ellipse"
    assert SHAPES.describe(Handmade())["name"] == f"{__name__}:Handmade"


EVERYTHING = [
    (registry, name)
    for registry in (STRATEGIES, DEVICES, NETWORKS, DROPOUTS)
    for name in registry
    if name not in ("leave", "join", "trace", "uniform")  # these have options without a default
] + [
    (DROPOUTS, "leave:at=3"),
    (DROPOUTS, "join:updates=3"),
    (DROPOUTS, "trace:path=a.csv"),
    (NETWORKS, "uniform:low=1,high=2"),
    (DEVICES, "uniform"),
]


@pytest.mark.parametrize(("registry", "spec"), EVERYTHING, ids=lambda x: getattr(x, "kind", x))
def test_everything_registered_can_be_described_and_made_again(registry, spec):
    thing = registry.create(spec)
    made = registry.create(registry.describe(thing))
    assert made == thing and type(made) is type(thing)
    assert registry.describe(made) == registry.describe(thing)
