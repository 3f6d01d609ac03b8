//! Memory budget of rendering one prompt. All values that the template makes count, and rendering fails when they
//! exceed the budget.
//!
//! Fuel limits the instructions, but one instruction can repeat or join values of any size. Filters, methods and the
//! checks of [`instrument`](super::instrument) report the bytes that they are about to make, or that they have made
//! from counted operands.

use super::instrument::{FACTOR, GROWN, PASS, SHOWN};
use minijinja::value::{Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, filters};
use std::cell::Cell;

/// Budget of every prompt, in bytes.
const BASE: usize = 64 << 20;
/// Additional budget per byte of the request: messages are joined with their tags, split and trimmed, each time in a
/// copy.
const PER_BYTE: usize = 32;
/// Bytes per list element.
const ELEMENT: usize = size_of::<Value>();
/// Maximum nesting of values: formatting, comparing and dropping them recurses.
const MAX_DEPTH: usize = 200;
/// Maximum number of repetitions of a value, and maximum width in a format.
const MAX_REPEATS: u64 = 1 << 32;
const MAX_FORMAT_DIGITS: usize = 4;
/// Maximum size of a group of the filters `batch` and `slice`, and maximum indent.
const MAX_WIDTH: usize = 1 << 16;

thread_local! {
    /// Remaining budget of this thread's rendering, in bytes.
    static LEFT: Cell<usize> = const { Cell::new(BASE) };
}

/// Starts a new budget for a rendering on this thread, of a request of `request` bytes.
pub(super) fn begin(request: usize) {
    LEFT.set(BASE.saturating_add(request.saturating_mul(PER_BYTE)));
}

/// Remaining bytes.
pub(super) fn left() -> usize {
    LEFT.get()
}

/// Takes bytes from the budget.
pub(super) fn charge(bytes: usize) -> Result<(), Error> {
    match LEFT.get().checked_sub(bytes) {
        Some(left) => {
            LEFT.set(left);
            Ok(())
        }
        None => Err(too_much()),
    }
}

fn too_much() -> Error {
    Error::new(ErrorKind::InvalidOperation, "the template makes too much text, or lists that are too long")
}

/// Charges the text of a value. A string is counted where it is used.
fn charge_shown(value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::String | ValueKind::Number | ValueKind::Bool | ValueKind::None | ValueKind::Undefined => Ok(()),
        _ => {
            let (before, mut left) = (LEFT.get(), LEFT.get());
            weigh(value, &mut left, 0)?;
            charge(before - left)
        }
    }
}

/// Subtracts the bytes of a value's text, or fails as soon as there are not enough.
fn weigh(value: &Value, left: &mut usize, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, "the template makes values that are nested too deeply"));
    }
    // Quotes, separators, and the digits of a number.
    let own = value.as_str().map_or(24, |text| 2 * text.len() + 4);
    *left = left.checked_sub(own).ok_or_else(too_much)?;
    if matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
        for item in value.try_iter()? {
            if value.kind() == ValueKind::Map {
                weigh(&value.get_item(&item)?, left, depth + 1)?;
            }
            weigh(&item, left, depth + 1)?;
        }
    }
    Ok(())
}

/// Bytes of a value without its elements.
fn own_bytes(value: &Value) -> usize {
    match value.as_str() {
        Some(text) => text.len(),
        None if matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) => {
            value.len().unwrap_or(0).saturating_mul(ELEMENT)
        }
        None => 0,
    }
}

/// Replaces filters and functions that can make large values from small ones by checked versions.
pub(super) fn install(env: &mut Environment<'_>) {
    env.add_filter(GROWN, |value: Value| charge(own_bytes(&value)).map(|()| value));
    env.add_filter(SHOWN, |value: Value| charge_shown(&value).map(|()| value));
    env.add_filter(FACTOR, factor);
    env.add_function(PASS, |bytes: usize| charge(bytes));
    env.remove_global("debug");
    for (name, filter) in [
        ("e", Value::from_function(filters::escape)),
        ("escape", Value::from_function(filters::escape)),
        ("lower", Value::from_function(filters::lower)),
        ("upper", Value::from_function(filters::upper)),
        ("title", Value::from_function(filters::title)),
        ("capitalize", Value::from_function(filters::capitalize)),
        ("trim", Value::from_function(filters::trim)),
        ("pprint", Value::from_function(filters::pprint)),
        ("lines", Value::from_function(filters::lines)),
        ("list", Value::from_function(filters::list)),
        ("replace", Value::from_function(filters::replace)),
        ("join", Value::from_function(filters::join)),
        ("split", Value::from_function(filters::split)),
        ("indent", Value::from_function(filters::indent)),
        ("format", Value::from_function(filters::format)),
        ("batch", Value::from_function(filters::batch)),
        ("slice", Value::from_function(filters::slice)),
        ("sum", Value::from_function(filters::sum)),
        ("sort", Value::from_function(filters::sort)),
        ("unique", Value::from_function(filters::unique)),
        ("reverse", Value::from_function(filters::reverse)),
        ("map", Value::from_function(filters::map)),
        ("select", Value::from_function(filters::select)),
        ("reject", Value::from_function(filters::reject)),
        ("selectattr", Value::from_function(filters::selectattr)),
        ("rejectattr", Value::from_function(filters::rejectattr)),
        ("groupby", Value::from_function(filters::groupby)),
        ("dictsort", Value::from_function(filters::dictsort)),
        ("chain", Value::from_function(filters::chain)),
        ("zip", Value::from_function(filters::zip)),
    ] {
        env.add_filter(name, move |state: &State<'_, '_>, args: Rest<Value>| {
            let (value, rest) = args.split_first().map_or((&Value::UNDEFINED, &[][..]), |(value, rest)| (value, rest));
            before(name, value, rest)?;
            let made = filter.call(state, &args)?;
            charge(own_bytes(&made)).map(|()| made)
        });
    }
}

/// Charges bytes that a filter or method is about to make in addition to its arguments. Its result is charged
/// afterwards.
fn before(name: &str, value: &Value, args: &[Value]) -> Result<(), Error> {
    let text = value.as_str();
    let arg = |i: usize| args.get(i).and_then(Value::as_str).unwrap_or_default();
    match name {
        "e" | "escape" | "lower" | "upper" | "title" | "capitalize" | "trim" | "pprint" => {
            charge_shown(value)?;
            charge(text.map_or(0, str::len).saturating_mul(3))
        }
        "replace" => {
            charge_shown(value)?;
            args.iter().try_for_each(charge_shown)?;
            // Texts of other values are short, or were counted.
            let (text, to) = (text.map_or_else(|| value.to_string(), str::to_owned), arg(1).len().max(24));
            let found = if arg(0).is_empty() { text.len() + 1 } else { text.matches(arg(0)).count() };
            charge(found.saturating_mul(to))
        }
        "join" => {
            charge_shown(value)?;
            args.iter().try_for_each(charge_shown)?;
            charge(value.len().unwrap_or(0).saturating_mul(arg(0).len() + ELEMENT))
        }
        "list" | "lines" | "splitlines" => charge(text.map_or(0, str::len).saturating_mul(ELEMENT)),
        "split" => {
            let text = text.unwrap_or_default();
            let parts = match arg(0) {
                "" => text.split_whitespace().count(),
                separator => text.matches(separator).count() + 1,
            };
            charge(parts.saturating_mul(ELEMENT).saturating_add(text.len()))
        }
        "indent" => {
            charge_shown(value)?;
            let given = args
                .iter()
                .map(|arg| arg.get_attr("width").ok().filter(|it| !it.is_undefined()).unwrap_or(arg.clone()));
            let width = given.filter_map(|width| width.as_i64()).max().unwrap_or(4).unsigned_abs() as usize;
            within(width)?;
            charge(text.unwrap_or_default().lines().count().saturating_mul(width))
        }
        "format" => {
            args.iter().try_for_each(charge_shown)?;
            charge(args.iter().filter_map(Value::as_str).map(str::len).sum())?;
            check_format(text.unwrap_or_default(), args)
        }
        "batch" | "slice" => {
            let size = args.first().and_then(Value::as_i64).unwrap_or(0).unsigned_abs() as usize;
            within(size)?;
            charge(value.len().unwrap_or(0).saturating_add(size).saturating_mul(2 * ELEMENT))
        }
        "sum" => charge_shown(value),
        _ => charge(own_bytes(value)),
    }
}

/// Refuses large widths in a format, written out or given as arguments.
fn check_format(format: &str, args: &[Value]) -> Result<(), Error> {
    let digits = format.split(|c: char| !c.is_ascii_digit()).map(str::len).max();
    let takes_widths = format.contains('*') || format.split('}').any(|field| field.matches('{').count() > 1);
    let wide = args.iter().filter_map(Value::as_i64).any(|width| width.unsigned_abs() > MAX_WIDTH as u64);
    match digits > Some(MAX_FORMAT_DIGITS) || takes_widths && wide {
        true => Err(Error::new(ErrorKind::InvalidOperation, "the template formats a text that is too wide")),
        false => Ok(()),
    }
}

fn within(width: usize) -> Result<(), Error> {
    match width <= MAX_WIDTH {
        true => Ok(()),
        false => {
            Err(Error::new(ErrorKind::InvalidOperation, "the template asks for a width or group that is too large"))
        }
    }
}

/// An operand of `*`. A number that repeats a text or list is bounded, so that lengths do not overflow.
fn factor(value: Value) -> Result<Value, Error> {
    match value.as_i64().is_some_and(|number| number.unsigned_abs() > MAX_REPEATS) {
        true => Err(too_much()),
        false => Ok(value),
    }
}

/// Methods of Python's types, with checks.
pub(super) fn method(state: &State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    match (method, args.first()) {
        // `value` is the separator.
        ("join", Some(list)) => before("join", list, std::slice::from_ref(value))?,
        ("upper" | "lower" | "title" | "capitalize" | "replace" | "split" | "splitlines" | "format", _) => {
            before(method, value, args)?;
        }
        // Other methods do not enlarge their input.
        _ => {}
    }
    let made = minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)?;
    charge(own_bytes(&made)).map(|()| made)
}

/// Charges the text of a value that the template shows.
pub(super) fn show(out: &mut Output<'_>, state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    charge_shown(value)?;
    charge(value.as_str().map_or(24, str::len))?;
    minijinja::escape_formatter(out, state, value)
}

/// Charges the text of a value that a filter is about to write.
pub(super) fn charge_written(value: &Value) -> Result<(), Error> {
    charge_shown(value)?;
    charge(value.as_str().map_or(24, str::len))
}
