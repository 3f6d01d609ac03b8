//! Adds checks to the source of a template wherever a few bytes can become many: operators that join or repeat values,
//! slices, lists, and text within loops and macros.
//!
//! The template engine lets filters and functions be replaced, but not operators. Each list and each result of `+`,
//! `~`, `*` and of a slice goes through the filter [`GROWN`], each operand of `~` through [`SHOWN`], each operand of
//! `*` through [`FACTOR`], and each pass through a loop or macro calls [`PASS`] with the bytes of its text; see
//! [`budget`](super::budget). Insertions have no line breaks and no effect on white space, so errors name the lines of
//! the original.

use minijinja::Error;
use minijinja::machinery::ast::{BinOp, BinOpKind, CallArg, Expr, Stmt};
use minijinja::machinery::{WhitespaceConfig, parse};
use minijinja::value::ValueKind;

/// Filter of new texts and lists.
pub(super) const GROWN: &str = "pegainfer_grown";
/// Filter of operands that `~` turns into text.
pub(super) const SHOWN: &str = "pegainfer_shown";
/// Filter of operands of `*`.
pub(super) const FACTOR: &str = "pegainfer_factor";
/// Function that receives the bytes of text in one pass through a loop or macro.
pub(super) const PASS: &str = "pegainfer_pass";

/// The same template with checks.
///
/// # Errors
/// The template does not parse.
pub(super) fn instrument(source: &str, name: &str) -> Result<String, Error> {
    let whitespace = WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };
    let template = parse(source, name, Default::default(), whitespace)?;
    let mut walk = Walk { source, insertions: Vec::new() };
    walk.statement(&template);
    // A stable sort: insertions at one place keep the order of the walk, which is that of the nesting.
    walk.insertions.sort_by_key(|(at, _)| *at);
    let (mut out, mut end) = (String::with_capacity(source.len() * 2), 0);
    for (at, text) in walk.insertions {
        out.push_str(&source[end..at]);
        out.push_str(&text);
        end = at;
    }
    out.push_str(&source[end..]);
    Ok(out)
}

struct Walk<'a> {
    source: &'a str,
    /// Offset in the source, and the text to insert there.
    insertions: Vec<(usize, String)>,
}

impl<'a> Walk<'a> {
    fn insert(&mut self, at: usize, text: impl Into<String>) {
        self.insertions.push((at, text.into()));
    }

    fn statements(&mut self, body: &[Stmt<'a>]) {
        body.iter().for_each(|statement| self.statement(statement));
    }

    fn statement(&mut self, statement: &Stmt<'a>) {
        match statement {
            Stmt::Template(it) => self.statements(&it.children),
            Stmt::EmitExpr(it) => self.expression(&it.expr),
            Stmt::ForLoop(it) => {
                self.expression(&it.iter);
                it.filter_expr.iter().for_each(|filter| self.expression(filter));
                let head = it.filter_expr.as_ref().unwrap_or(&it.iter).span().end_offset as usize;
                self.pass(head, &it.body);
                self.statements(&it.else_body);
            }
            Stmt::IfCond(it) => {
                self.expression(&it.expr);
                self.statements(&it.true_body);
                self.statements(&it.false_body);
            }
            Stmt::WithBlock(it) => {
                it.assignments.iter().for_each(|(_, value)| self.expression(value));
                self.statements(&it.body);
            }
            Stmt::Set(it) => self.expression(&it.expr),
            Stmt::SetBlock(it) => {
                it.filter.iter().for_each(|filter| self.expression(filter));
                self.statements(&it.body);
            }
            Stmt::AutoEscape(it) => self.statements(&it.body),
            Stmt::FilterBlock(it) => {
                self.expression(&it.filter);
                self.statements(&it.body);
            }
            Stmt::Block(it) => self.pass(it.span().start_offset as usize, &it.body),
            Stmt::Macro(it) => {
                it.defaults.iter().for_each(|default| self.expression(default));
                let names = it.args.last().map_or(it.span().start_offset, |name| name.span().end_offset);
                let head = it.defaults.last().map_or(names, |default| default.span().end_offset);
                self.pass(head as usize, &it.body);
            }
            Stmt::CallBlock(it) => {
                self.call(&it.call.expr, &it.call.args);
                it.macro_decl.defaults.iter().for_each(|default| self.expression(default));
                self.pass(it.call.span().end_offset as usize, &it.macro_decl.body);
            }
            Stmt::Do(it) => self.call(&it.call.expr, &it.call.args),
            // There are no other templates.
            Stmt::EmitRaw(_) | Stmt::Import(_) | Stmt::FromImport(_) | Stmt::Extends(_) | Stmt::Include(_) => {}
            Stmt::Continue(_) | Stmt::Break(_) => {}
        }
    }

    /// Instruments a body that runs many times, after a tag that ends after `head`.
    fn pass(&mut self, head: usize, body: &[Stmt<'a>]) {
        let bytes = text_bytes(body);
        if let Some(end) = self.source[head..].find("%}").filter(|_| bytes > 0) {
            let end = head + end;
            // Keep the control of white space after the tag.
            let mark = self.source[..end].chars().next_back().filter(|mark| matches!(mark, '-' | '+'));
            let mark = mark.map_or(String::new(), String::from);
            self.insert(end + 2, format!("{{% do {PASS}({bytes}) {mark}%}}"));
        }
        self.statements(body);
    }

    fn call(&mut self, callee: &Expr<'a>, args: &[CallArg<'a>]) {
        self.expression(callee);
        for arg in args {
            match arg {
                CallArg::Pos(value)
                | CallArg::Kwarg(_, value)
                | CallArg::PosSplat(value)
                | CallArg::KwargSplat(value) => self.expression(value),
            }
        }
    }

    fn expression(&mut self, expression: &Expr<'a>) {
        match expression {
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::Slice(it) => {
                let (start, end) = (start(&it.expr), it.span().end_offset as usize);
                self.insert(start, "((");
                self.expression(&it.expr);
                [&it.start, &it.stop, &it.step].into_iter().flatten().for_each(|bound| self.expression(bound));
                self.insert(end, format!(")|{GROWN})"));
            }
            Expr::UnaryOp(it) => self.expression(&it.expr),
            Expr::BinOp(it) => self.operator(it, it.span().start_offset as usize, it.span().end_offset as usize),
            Expr::Compare(it) => {
                self.expression(&it.expr);
                it.ops.iter().for_each(|op| self.expression(&op.expr));
            }
            Expr::IfExpr(it) => {
                self.expression(&it.test_expr);
                self.expression(&it.true_expr);
                it.false_expr.iter().for_each(|value| self.expression(value));
            }
            Expr::Filter(it) => {
                it.expr.iter().for_each(|value| self.expression(value));
                it.args.iter().for_each(|arg| self.argument(arg));
            }
            Expr::Test(it) => {
                self.expression(&it.expr);
                it.args.iter().for_each(|arg| self.argument(arg));
            }
            Expr::GetAttr(it) => self.expression(&it.expr),
            Expr::GetItem(it) => {
                self.expression(&it.expr);
                self.expression(&it.subscript_expr);
            }
            Expr::Call(it) => self.call(&it.expr, &it.args),
            Expr::List(it) => {
                let span = it.span();
                // Lists without brackets cannot be wrapped, and are no longer than the source.
                let (at, first) =
                    (span.start_offset, it.items.first().map_or(span.end_offset, |item| item.span().start_offset));
                let bracket = at < first && self.source[at as usize..].starts_with('[');
                self.wrapped(bracket.then_some((at as usize, span.end_offset as usize)), &it.items, &[]);
            }
            Expr::Map(it) => {
                let (at, end) = (it.span().start_offset as usize, it.span().end_offset as usize);
                let brace = self.source[at..].starts_with('{');
                self.wrapped(brace.then_some((at, end)), &it.keys, &it.values);
            }
        }
    }

    /// Wraps a list or map literal at these offsets, if they are known, and visits its items.
    fn wrapped(&mut self, offsets: Option<(usize, usize)>, items: &[Expr<'a>], more: &[Expr<'a>]) {
        if let Some((start, _)) = offsets {
            self.insert(start, "((");
        }
        items.iter().chain(more).for_each(|item| self.expression(item));
        if let Some((_, end)) = offsets {
            self.insert(end, format!(")|{GROWN})"));
        }
    }

    fn argument(&mut self, arg: &CallArg<'a>) {
        let (CallArg::Pos(value) | CallArg::Kwarg(_, value) | CallArg::PosSplat(value) | CallArg::KwargSplat(value)) =
            arg;
        self.expression(value);
    }

    fn operator(&mut self, it: &BinOp<'a>, start: usize, end: usize) {
        let (symbol, operand) = match it.op {
            // A number cannot make a text or a list grow.
            BinOpKind::Add if is_number(&it.left) || is_number(&it.right) => ('+', None),
            BinOpKind::Add => ('+', Some(None)),
            BinOpKind::Concat => ('~', Some(Some(SHOWN))),
            BinOpKind::Mul => ('*', Some(Some(FACTOR))),
            _ => ('+', None),
        };
        let Some(operand) = operand else {
            self.expression(&it.left);
            self.expression(&it.right);
            return;
        };
        self.insert(start, if operand.is_some() { "((" } else { "(" });
        self.expression(&it.left);
        if let Some(filter) = operand {
            // Only the operator and parentheses are between the operands.
            let left = it.left.span().end_offset as usize;
            let at = left + self.source[left..].find(symbol).unwrap_or(0);
            self.insert(at, format!(")|{filter}"));
            self.insert(at + 1, "(");
        }
        self.expression(&it.right);
        let close = operand.map_or(String::new(), |filter| format!(")|{filter}"));
        self.insert(end, format!("{close})|{GROWN}"));
    }
}

fn is_number(expression: &Expr<'_>) -> bool {
    matches!(expression, Expr::Const(it) if it.value.kind() == ValueKind::Number)
}

/// Start of the expression that a slice is taken from. Parentheses around it may be on either side.
fn start(expression: &Expr<'_>) -> usize {
    match expression {
        Expr::Slice(it) => start(&it.expr),
        Expr::GetAttr(it) => start(&it.expr),
        Expr::GetItem(it) => start(&it.expr),
        Expr::Call(it) => start(&it.expr),
        Expr::Test(it) => start(&it.expr),
        Expr::BinOp(it) => start(&it.left),
        Expr::Compare(it) => start(&it.expr),
        Expr::IfExpr(it) => start(&it.true_expr),
        Expr::Filter(it) => it.expr.as_ref().map_or(it.span().start_offset as usize, start),
        Expr::Var(_) | Expr::Const(_) | Expr::UnaryOp(_) | Expr::List(_) | Expr::Map(_) => {
            expression.span().start_offset as usize
        }
    }
}

/// Bytes of text in a body, without its loops and macros, which count their own.
fn text_bytes(body: &[Stmt<'_>]) -> usize {
    let of = |statement: &Stmt<'_>| match statement {
        Stmt::EmitRaw(it) => it.raw.len(),
        Stmt::ForLoop(it) => text_bytes(&it.else_body),
        Stmt::IfCond(it) => text_bytes(&it.true_body) + text_bytes(&it.false_body),
        Stmt::WithBlock(it) => text_bytes(&it.body),
        Stmt::SetBlock(it) => text_bytes(&it.body),
        Stmt::AutoEscape(it) => text_bytes(&it.body),
        Stmt::FilterBlock(it) => text_bytes(&it.body),
        _ => 0,
    };
    body.iter().map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::{budget, dialect};
    use minijinja::context;
    use serde_json::json;

    #[test]
    fn a_template_with_checks_renders_the_same() {
        let context = json!({
            "messages": [{"role": "user", "content": "a  b"}, {"role": "assistant", "content": "x</think>y"}],
            "items": [3, 1, 2], "text": "text", "tool": {"name": "n", "parameters": {"a": [1, {"b": null}]}},
        });
        for source in [
            "{{ 1 + 2 * 3 - -4 }} {{ (1 + 2) * 3 }} {{ 2 ** 3 + 1 }} {{ 7 // 2 * 2 ~ 'x' }}",
            "{{ 'a' + text + 'b' ~ 1 ~ items ~ none ~ tool }} {{ (text + 'a') ~ ('b' ~ (text)) }}",
            "{{ text[1:] + text[::-1] }} {{ (text + 'more')[2:][1] }} {{ messages[0].content[1:].strip() }}",
            "{{ items[1:] + [4] }} {{ ([1] + items)[:2] }} {{ items * 2 }} {{ 'ab' * 3 }} {{ (items + items)|join('-') }}",
            "{% set a, b = 1, [2] + [3] %}{{ a }}{{ b }}{% set t = 1, [2], [3] %}{{ t }}{% set u = (1, 2) %}{{ u }}",
            "{{ {'a': 1 + 1, 'b': [text ~ '!']} }} {{ {'k': {'l': []}}.k.l }} {{ [[1, 2][1], {}] }} {{ {} }}",
            "{{ 'yes' if text + 'a' == 'texta' and not 1 + 1 == 3 else 'no' }} {{ text ~ 'a' in ['texta'] }}",
            "{{ (text + 'a') is string }} {{ (text ~ 'a') is string and (items + [1]) is iterable }}",
            "a\n{% for m in messages %}\n  {{- m.role + ': ' + m.content }}\n  text\n{% else %}\nnone\n{% endfor %}\nb",
            "{%- for m in messages if m.role ~ '' == 'user' -%}\n  text {{ loop.index + 1 }}\n{%- endfor -%} c",
            "{% for m in messages +%}\n x\n{% endfor +%}\n",
            "{% for i in items recursive %}{{ i }} text{% if i is iterable %}{{ loop(i) }}{% endif %}{% endfor %}",
            "{% macro m(x, y='%' + 'd') %}\n text {{ x ~ y }}\n{% endmacro %}{{ m('a') }}{{ m(x='b', y=items[1:]) }}",
            "{% macro m() -%}  text {{ caller(1 + 1) }}{% endmacro %}{% call(n) m() %}  <{{ n }}> text{% endcall %}",
            "{% set ns = namespace(x='', n=0) %}{% for m in messages %}{% set ns.x = ns.x ~ m.content %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.x }}{{ ns.n }}",
            "{% set x %}text {{ text + 'a' }}{% endset %}{{ x|upper ~ x }}{% filter upper %}a{{ text }}{% endfilter %}",
            "{% with a = text + 'b', c = [1] %}{{ a ~ c }}{% endwith %}{% block b %}text{{ 1 + 1 }}{% endblock %}",
            "{{ tool|tojson(indent=2 + 2) }}{{ text|replace('t', 'T' + 'U')|indent(2 * 2, true) }}{{ '%s-%d'|format(text ~ 1, 2) }}",
            "{{ '{} {}'.format(text + 'a', 1) }}{{ ', '.join(items|map('string')|list + ['x']) }}{{ text.split('e')[-1] + text.replace('t', '') }}",
            "{{ items|sort|reverse|list + items|map('abs')|list }}{{ items|sum + 1 }}{{ messages|selectattr('role', 'equalto', 'us' + 'er')|list|length }}",
            "{# a comment + ~ * #}{% raw %}{{ a + b }}{% endraw %}{{ \"q+'~\" + '*\"' ~ '%}' }}{% if true %}%}{% endif %}",
            "{{ text\n  + 'a'\n  ~ (\n 'b' )\n }}",
            "é{{ 'ü' + text ~ 'ß' }}{% for m in messages %}ö{{ m.content[1:] ~ '€' }}{% endfor %}",
            "{{ (text ~ 'a', 1)[0] ~ ((((text)))) ~ (1) }}{{ (items)[(0 + 1):] }}{{ (text|upper)[1:] ~ text|upper }}{{ -1 * items[0] + -(items[1]) }}",
        ] {
            let env = dialect::environment();
            budget::begin(0);
            let expected = env.render_str(source, &context).unwrap_or_else(|error| panic!("{source}: {error:#}"));
            let checked = instrument(source, "t").unwrap();
            assert_eq!(checked.matches('\n').count(), source.matches('\n').count());
            let rendered = env.render_str(&checked, &context);
            assert_eq!(rendered.unwrap_or_else(|error| panic!("{checked}: {error:#}")), expected, "{checked}");
        }
    }

    #[test]
    fn an_error_names_the_line_of_the_template() {
        let source = "text\n{% for i in [1] %}\n{{ 'a' ~ 'b' }}\n{{ 1 + messages }}{% endfor %}";
        let checked = instrument(source, "t").unwrap();
        let error = dialect::environment().render_str(&checked, context! { messages => "x" }).unwrap_err();
        assert_eq!(error.line(), Some(4));
        assert_eq!(instrument("a\n{% if %}", "t").unwrap_err().line(), Some(2));
    }
}
