// Languages of code blocks: what comments, strings and numbers look like, and the keywords.

const words = (text) => new Set(text.trim().split(/\s+/));

const LINE = '\\/\\/[^\\n]*';
const BLOCK = '\\/\\*[^]*?(?:\\*\\/|$)';
const HASH = '#[^\\n]*';
const DASHES = '--[^\\n]*';
const DOUBLE = '"(?:[^"\\\\\\n]|\\\\[^])*"?';
const SINGLE = '\'(?:[^\'\\\\\\n]|\\\\[^])*\'?';
const BACKTICK = '`(?:[^`\\\\]|\\\\[^])*`?';
/** A character, but no lifetime such as `'a`. */
const CHARACTER = '\'(?:[^\'\\\\\\n]|\\\\[^\\n]{1,8})\'';
const TRIPLE = '[rbufRBUF]{0,2}(?:"""[^]*?(?:"""|$)|\'\'\'[^]*?(?:\'\'\'|$))';
const NUMBER = '\\b(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d[\\d_]*)?(?:[eE][+-]?\\d+)?)(?:[a-zA-Z]\\w{0,4})?\\b';

const C_WORDS = `auto break case const continue default do else enum extern for goto if inline register return sizeof static
  struct switch typedef union volatile while`;
const C_TYPES = `bool char double float int int8_t int16_t int32_t int64_t long short signed size_t uint8_t uint16_t uint32_t
  uint64_t unsigned void NULL true false nullptr`;

const c = {
  comment: [LINE, BLOCK],
  string: [DOUBLE, CHARACTER],
  meta: '#[ \\t]*[a-z]+|\\[\\[[^\\]\\n]{0,99}\\]\\]',
  keywords: words(`${C_WORDS} alignas asm catch class co_await co_return co_yield concept constexpr decltype delete explicit final
    friend mutable namespace new noexcept operator override private protected public requires static_assert template this
    throw try typename using virtual __device__ __global__ __host__ __shared__ __forceinline__ __restrict__ __launch_bounds__`),
  types: words(C_TYPES),
};

const java = {
  comment: [LINE, BLOCK],
  string: [TRIPLE, DOUBLE, CHARACTER],
  meta: '@[\\w.]+',
  keywords: words(`abstract as assert async await base break case catch class const continue data default delegate do else enum
    event extends final finally fixed for foreach fun get goto if implements import in init instanceof interface internal is
    lateinit lock native new object open operator out override package params private protected public readonly record ref
    return sealed set static strictfp struct suspend super switch synchronized this throw throws transient try typealias
    typeof unsafe using val var virtual volatile when where while yield`),
  types: words('bool boolean byte char decimal double dynamic false float int long null object sbyte short string true void'),
};

const javascript = {
  comment: [LINE, BLOCK],
  string: [DOUBLE, SINGLE, BACKTICK],
  meta: '@\\w+',
  keywords: words(`abstract as async await break case catch class const continue debugger declare default delete do else enum
    export extends finally for from function get if implements import in instanceof interface keyof let namespace new of
    private protected public readonly return satisfies set static super switch this throw try type typeof var void while
    with yield`),
  types: words('any bigint boolean false never null number object string symbol true undefined unknown NaN Infinity'),
};

const python = {
  comment: [HASH],
  string: [TRIPLE, `[rbufRBUF]{0,2}${DOUBLE}`, `[rbufRBUF]{0,2}${SINGLE}`],
  meta: '@[\\w.]+',
  keywords: words(`and as assert async await break case class continue def del elif else except finally for from global if
    import in is lambda match nonlocal not or pass raise return try while with yield`),
  types: words('False None True bool bytes dict float int list object self set str tuple type'),
};

const rust = {
  comment: [LINE, BLOCK],
  string: ['b?r#*"[^]*?(?:"#*|$)', `b?${DOUBLE}`, `b?${CHARACTER}`],
  meta: '#!?\\[[^\\]\\n]{0,99}\\]|\'\\w+|\\b[a-z_]\\w{0,40}!(?!=)',
  keywords: words(`as async await break const continue crate dyn else enum extern fn for if impl in let loop macro_rules match mod
    move mut pub ref return self static struct super trait type union unsafe use where while`),
  types: words(`Self bool char f32 f64 false i8 i16 i32 i64 i128 isize str true u8 u16 u32 u64 u128 usize`),
};

const go = {
  comment: [LINE, BLOCK],
  string: [DOUBLE, SINGLE, BACKTICK],
  keywords: words(`break case chan const continue default defer else fallthrough for func go goto if import interface map package
    range return select struct switch type var`),
  types: words(`any bool byte comparable complex64 complex128 error false float32 float64 int int8 int16 int32 int64 iota nil rune
    string true uint uint8 uint16 uint32 uint64 uintptr`),
};

const swift = {
  ...rust,
  string: [TRIPLE, DOUBLE],
  meta: '@\\w+|#\\w+',
  keywords: words(`actor as associatedtype async await break case catch class continue default defer deinit do else enum extension
    fallthrough fileprivate for func get guard if import in init inout internal is lazy let mutating open operator override
    private protocol public repeat rethrows return self set some static struct subscript super switch throw throws try
    typealias var weak where while`),
  types: words('Any Bool Character Double Float Int Self String Void false nil true'),
};

const shell = {
  comment: ['(?<![^\\s;])#[^\\n]*'],
  string: ['"(?:[^"\\\\]|\\\\[^])*"?', '\'[^\']*\'?'],
  meta: '\\$(?:\\w+|\\{[^}\\n]{0,99}\\}|[@#?*!$])|(?<=\\s)--?[a-zA-Z][\\w-]*',
  keywords: words(`alias break case cd continue declare do done echo elif else esac eval exec exit export fi for function if in
    local read return select set shift source sudo test then trap unset until while`),
  types: words('false true'),
};

const sql = {
  comment: [DASHES, BLOCK],
  string: ['\'(?:[^\']|\'\')*\'?', DOUBLE],
  ignoreCase: true,
  keywords: words(`add all alter and any as asc begin between by cascade case check column commit constraint create cross database
    default delete desc distinct drop else end except exists foreign from full group having if in index inner insert intersect
    into is join key left like limit not offset on or order outer over partition primary references returning right rollback
    select set table then trigger union unique update using values view when where window with`),
  types: words('bigint boolean char date decimal double false float int integer null numeric real serial text timestamp true varchar'),
};

const ruby = {
  comment: [HASH],
  string: [DOUBLE, SINGLE],
  meta: '(?<![:\\w]):\\w+|@{1,2}\\w+|\\$\\w+',
  keywords: words(`alias and begin break case class def do else elsif end ensure for if in include module next not or raise redo
    require rescue retry return self super then undef unless until when while yield defmodule defp fn my our sub use foreach
    library function repeat`),
  types: words('FALSE NA NULL TRUE false nil true'),
};

const php = {
  ...java,
  comment: [LINE, BLOCK, HASH],
  string: [DOUBLE, SINGLE],
  meta: '\\$\\w+|<\\?php|\\?>',
  keywords: words(`abstract and array as break case catch class clone const continue declare default do echo else elseif extends
    final finally fn for foreach function global if implements include instanceof interface isset list match namespace new or
    print private protected public readonly require require_once return static switch throw trait try unset use var while yield`),
};

const lua = {
  comment: ['--\\[\\[[^]*?(?:\\]\\]|$)', DASHES, '\\{-[^]*?(?:-\\}|$)'],
  string: [DOUBLE, SINGLE, '\\[\\[[^]*?(?:\\]\\]|$)'],
  keywords: words(`and break case class data deriving do else elseif end for function goto if import in instance let local module
    newtype not of or repeat return then type until where while`),
  types: words('False True false nil true'),
};

const json = {
  comment: [LINE, BLOCK],
  key: '"(?:[^"\\\\\\n]|\\\\[^]){0,200}"(?=\\s{0,20}:)',
  string: [DOUBLE],
  keywords: words(''),
  types: words('false null true'),
};

const yaml = {
  comment: ['(?<![^\\s])[#;][^\\n]*'],
  key: '(?<=(?:^|\\n)[ \\t]{0,60}(?:- {1,9})?)[\\w.$/-]{1,80}(?=[ \\t]{0,20}[:=])|(?<=(?:^|\\n))\\[{1,2}[^\\]\\n]{0,99}\\]{1,2}',
  string: [TRIPLE, DOUBLE, SINGLE],
  meta: '[&*!][\\w!]+|\\$\\{[^}\\n]{0,99}\\}',
  keywords: words(''),
  types: words('False True false no null off on true yes'),
};

const docker = {
  ...shell,
  ignoreCase: true,
  key: '(?<=(?:^|\\n))[\\w.-]{1,80}(?=[ \\t]{0,20}:)',
  keywords: words(`add arg cmd copy entrypoint env expose from healthcheck label onbuild run shell stopsignal user volume workdir as
    ifeq ifneq ifdef endif include define endef export`),
};

const css = {
  comment: [BLOCK],
  string: [DOUBLE, SINGLE],
  meta: '@[\\w-]+|![a-z]+|--[\\w-]+',
  key: '[\\w-]{1,40}(?=\\s{0,20}:(?![^;{}]{0,200}\\{))',
  number: '#[\\da-fA-F]{3,8}\\b|-?\\b\\d+(?:\\.\\d+)?(?:%|[a-z]{1,4}\\b)?',
  keywords: words(''),
  types: words(''),
};

const html = {
  comment: ['<!--[^]*?(?:-->|$)'],
  keyword: '<[!?/]?[\\w:-]+|[/?]?>',
  key: '[\\w:@.-]{1,40}(?==["\'{])',
  string: ['(?<==)"[^"]*"?', '(?<==)\'[^\']*\'?'],
  number: '&[#\\w]+;',
  keywords: words(''),
  types: words(''),
};

const tex = {
  comment: ['(?<!\\\\)%[^\\n]*'],
  keyword: '\\\\(?:[a-zA-Z@]+|[^])',
  string: [],
  meta: '\\$\\$?',
  keywords: words(''),
  types: words(''),
};

const diff = {
  comment: ['(?<=(?:^|\\n))(?:@@|diff |index |--- |\\+\\+\\+ )[^\\n]*'],
  added: '(?<=(?:^|\\n))\\+[^\\n]*',
  removed: '(?<=(?:^|\\n))-[^\\n]*',
  string: [],
  number: '(?!)',
  keywords: words(''),
  types: words(''),
};

/** Languages by the names that follow a fence. */
export const LANGUAGES = new Map(
  [
    [c, 'c h cc cpp c++ cxx hpp cuda cu objc glsl hlsl wgsl metal arduino'],
    [java, 'java kotlin kt cs csharp c# scala groovy dart'],
    [javascript, 'js javascript jsx mjs cjs ts typescript tsx vue svelte'],
    [python, 'py python python3 pyi starlark mojo ipython'],
    [rust, 'rs rust zig'],
    [go, 'go golang proto protobuf'],
    [swift, 'swift'],
    [shell, 'sh bash zsh shell console fish shellsession powershell ps1 bat'],
    [sql, 'sql mysql postgresql postgres sqlite plsql'],
    [ruby, 'rb ruby perl pl elixir ex exs r julia jl crystal nim'],
    [php, 'php'],
    [lua, 'lua haskell hs elm'],
    [json, 'json jsonc json5 jsonl'],
    [yaml, 'yaml yml toml ini conf cfg properties env'],
    [docker, 'dockerfile docker makefile make cmake'],
    [css, 'css scss sass less'],
    [html, 'html xml svg xhtml htm jinja markdown md'],
    [tex, 'tex latex'],
    [diff, 'diff patch'],
  ].flatMap(([language, names]) => names.split(' ').map((name) => [name, { number: NUMBER, ...language }])),
);
