//! The Jinja dialect of chat templates: the settings of transformers' `apply_chat_template`, and Python's methods and
//! formatting.

use super::budget;
use crate::tojson::{python_float, tojson};
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, UndefinedBehavior};
use thiserror::Error as ThisError;

/// An error raised by the template itself.
#[derive(Debug, ThisError)]
#[error("{0}")]
struct Raised(String);

/// Maximum number of instructions per prompt, about a second.
const FUEL: u64 = 20_000_000;

/// An environment that renders chat templates.
pub(super) fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    env.set_fuel(Some(FUEL));
    env.set_trim_blocks(true);
    env.set_lstrip_blocks(true);
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(budget::method);
    env.set_formatter(format_like_python);
    budget::install(&mut env);
    env.add_filter("tojson", bounded_tojson);
    env.add_filter("string", string_like_python);
    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", strftime_now);
    env
}

/// The message of an error raised by the template itself.
pub(super) fn raised(error: &Error) -> Option<&str> {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(inner) = source {
        if let Some(Raised(message)) = inner.downcast_ref() {
            return Some(message);
        }
        source = inner.source();
    }
    None
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn strftime_now(format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, &jiff::Zoned::now())
        .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}")))
}

/// Formats `{{ true }}`, `{{ none }}` and `{{ 0.00001 }}` like Python.
fn format_like_python(out: &mut minijinja::Output, state: &State, value: &Value) -> Result<(), Error> {
    match scalar_like_python(value) {
        Some(text) => out.write_str(&text).map_err(Error::from),
        None => budget::show(out, state, value),
    }
}

/// The filter `string`, which is Python's `str`.
fn string_like_python(value: &Value) -> Result<Value, Error> {
    if value.kind() == ValueKind::String {
        return Ok(value.clone());
    }
    budget::charge_written(value)?;
    Ok(scalar_like_python(value).unwrap_or_else(|| value.to_string()).into())
}

/// The filter `tojson`, within the budget.
fn bounded_tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    budget::charge_written(value)?;
    let made = tojson(value, &options, budget::left())?;
    budget::charge(made.as_str().map_or(0, str::len))?;
    Ok(made)
}

/// Python's text of a value that minijinja formats differently; `None` for all others.
fn scalar_like_python(value: &Value) -> Option<String> {
    match value.kind() {
        ValueKind::Bool => Some(if value.is_true() { "True" } else { "False" }.to_owned()),
        ValueKind::None => Some("None".to_owned()),
        ValueKind::Number if !value.is_integer() => f64::try_from(value.clone()).ok().map(python_float),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_template_that_runs_too_long_ends() {
        budget::begin(0);
        let source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}";
        let error = environment().render_str(source, ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfFuel);
    }

    #[test]
    fn the_python_dialect_is_understood() {
        let cases = [
            ("{{ 'a,b'.split(',')[-1] }}{{ ' x '.strip() }}{{ 'xy'.startswith('x') }}", "bxTrue"),
            (
                "{% for m in messages[::-1] %}{{ m.content }}{% if loop.index0 == 0 %}{% continue %}{% endif %}{% endfor %}",
                "ba",
            ),
            (
                "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
                "2",
            ),
            ("{% for k, v in {'z': 1, 'a': none}.items() %}{{ k }}={{ v }};{% endfor %}", "z=1;a=None;"),
            ("{%- macro m(x, y='d') %}{{ x }}{{ y }}{% endmacro %}{{ m('q') }}", "qd"),
            ("    {% if true %}\n  kept\n    {% endif %}\n", "  kept\n"),
            (
                "{{ f }} {{ f | string }} {{ 2.0 | string }} {{ 10000000000000000.0 }} {{ 1.5 }} {{ 3 | string }}",
                "1e-05 1e-05 2.0 1e+16 1.5 3",
            ),
            ("{{ true | string }} {{ none | string }} {{ ('a' | string).upper() }} {{ 1 + 0.5 }}", "True None A 1.5"),
            ("{{ messages is iterable }}{{ messages[0] is mapping }}{{ 'é' ~ 1 }}", "TrueTrueé1"),
        ];
        let context = json!({"f": 0.00001, "messages": [{"content": "a"}, {"content": "b"}]});
        let render = |source: &str| environment().render_str(source, &context).unwrap();
        for (source, expected) in cases {
            assert_eq!(render(source), expected, "{source}");
        }
        let year = render("{{ strftime_now('%Y') }}");
        assert!(year.parse::<u32>().unwrap() >= 2026);
    }
}
