//! Jinja's `tojson` as transformers defines it: Python's `json.dumps(value, ensure_ascii=False)`.
//!
//! Models were trained on prompts written by it, so every space matters: `", "` and `": "` between elements, keys in
//! insertion order, no HTML escapes.

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{CharEscape, Formatter, Serializer};
use std::io::{self, Write};

/// Maximum indentation of a level.
const MAX_INDENT: usize = 1000;

/// The filter `value | tojson(indent=…, ensure_ascii=…, sort_keys=…, separators=…)`, limited to `max_bytes`.
pub fn tojson(value: &Value, options: &Kwargs, max_bytes: usize) -> Result<Value, Error> {
    let invalid = |e: &dyn std::fmt::Display| Error::new(ErrorKind::BadSerialization, e.to_string());
    let mut json = serde_json::to_value(value).map_err(|e| invalid(&e))?;
    if options.get::<Option<bool>>("sort_keys")?.unwrap_or(false) {
        json.sort_all_objects();
    }
    let indent: Option<usize> = options.get("indent")?;
    if indent > Some(MAX_INDENT) {
        return Err(invalid(&format!("tojson: indent must be at most {MAX_INDENT}")));
    }
    let separators: Option<Vec<String>> = options.get("separators")?;
    let [item, key] = match separators.as_deref() {
        None if indent.is_some() => [",".to_string(), ": ".to_string()],
        None => [", ".to_string(), ": ".to_string()],
        Some([item, key]) => [item.clone(), key.clone()],
        Some(_) => return Err(invalid(&"tojson: separators must be a pair of strings")),
    };
    let ensure_ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    options.assert_all_used()?;
    let style = PythonStyle { item, key, indent, ensure_ascii, depth: 0, has_value: false };
    let mut out = Limited { bytes: Vec::new(), max_bytes };
    json.serialize(&mut Serializer::with_formatter(&mut out, style)).map_err(|e| invalid(&e))?;
    let text = String::from_utf8(out.bytes).map_err(|e| invalid(&e))?;
    Ok(Value::from_safe_string(text))
}

/// `json.dumps(value, ensure_ascii=False)`.
pub fn dumps(value: &serde_json::Value) -> String {
    let (item, key) = (", ".to_string(), ": ".to_string());
    let style = PythonStyle { item, key, indent: None, ensure_ascii: false, depth: 0, has_value: false };
    let mut out = Vec::new();
    // Writing to memory does not fail, and the output is UTF-8.
    let written = value.serialize(&mut Serializer::with_formatter(&mut out, style));
    debug_assert!(written.is_ok(), "{written:?}");
    String::from_utf8_lossy(&out).into_owned()
}

/// A writer into memory, limited to a maximum of bytes.
struct Limited {
    bytes: Vec<u8>,
    max_bytes: usize,
}

impl Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.max_bytes {
            return Err(io::Error::other("tojson: the text is too long"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes JSON like CPython's encoder.
struct PythonStyle {
    item: String,
    key: String,
    indent: Option<usize>,
    ensure_ascii: bool,
    depth: usize,
    /// True if the container that is being closed has elements.
    has_value: bool,
}

impl PythonStyle {
    fn open<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.has_value = false;
        writer.write_all(bracket)
    }

    fn close<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.has_value {
            self.line_break(writer)?;
        }
        self.has_value = true;
        writer.write_all(bracket)
    }

    fn separate<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.line_break(writer)
    }

    fn line_break<W: ?Sized + Write>(&self, writer: &mut W) -> io::Result<()> {
        match self.indent {
            Some(width) => write!(writer, "\n{:1$}", "", width * self.depth),
            None => Ok(()),
        }
    }
}

impl Formatter for PythonStyle {
    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.separate(writer, first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_value = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.separate(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_value = true;
        Ok(())
    }

    fn write_f64<W: ?Sized + Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(python_float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        if !self.ensure_ascii {
            return writer.write_all(fragment.as_bytes());
        }
        for unit in fragment.encode_utf16() {
            match u8::try_from(unit) {
                Ok(byte) if byte.is_ascii() => writer.write_all(&[byte])?,
                _ => write!(writer, "\\u{unit:04x}")?,
            }
        }
        Ok(())
    }

    fn write_char_escape<W: ?Sized + Write>(&mut self, writer: &mut W, escape: CharEscape) -> io::Result<()> {
        match escape {
            CharEscape::Quote => writer.write_all(b"\\\""),
            CharEscape::ReverseSolidus => writer.write_all(b"\\\\"),
            CharEscape::Solidus => writer.write_all(b"/"),
            CharEscape::Backspace => writer.write_all(b"\\b"),
            CharEscape::FormFeed => writer.write_all(b"\\f"),
            CharEscape::LineFeed => writer.write_all(b"\\n"),
            CharEscape::CarriageReturn => writer.write_all(b"\\r"),
            CharEscape::Tab => writer.write_all(b"\\t"),
            CharEscape::AsciiControl(byte) => write!(writer, "\\u{byte:04x}"),
        }
    }
}

/// Python's `repr` of a float: the shortest digits that read back, in exponent form below 1e-4 and from 1e16 on.
pub fn python_float(value: f64) -> String {
    let scientific = format!("{value:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(e) if !(-4..16).contains(&e) => {
            let sign = if e < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", e.abs())
        }
        _ if value.fract() == 0.0 => format!("{value:.1}"),
        _ => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(template: &str, value: serde_json::Value) -> String {
        let mut env = minijinja::Environment::new();
        env.add_filter("tojson", |value: &Value, options: Kwargs| tojson(value, &options, usize::MAX));
        env.render_str(template, minijinja::context! { v => Value::from_serialize(value) }).unwrap()
    }

    #[test]
    fn writes_what_python_writes() {
        // Expected strings: CPython 3.11, json.dumps(value, ensure_ascii=False, …).
        let value =
            json!({"z": [1, 2.0, -0.5, true, null], "a": {"k": "<b> & 'x' \"é\" \u{1f}\u{7f}\n"}, "e": [], "o": {}});
        assert_eq!(
            render("{{ v | tojson }}", value.clone()),
            "{\"z\": [1, 2.0, -0.5, true, null], \"a\": {\"k\": \"<b> & 'x' \\\"é\\\" \\u001f\u{7f}\\n\"}, \"e\": [], \"o\": {}}"
        );
        assert_eq!(
            render("{{ v | tojson(indent=2) }}", json!({"b": [1, {"c": []}], "a": {}})),
            "{\n  \"b\": [\n    1,\n    {\n      \"c\": []\n    }\n  ],\n  \"a\": {}\n}"
        );
        assert_eq!(
            render(
                "{{ v | tojson(sort_keys=true, ensure_ascii=true, separators=[',', ':']) }}",
                json!({"b": "é🎉", "a": 1})
            ),
            "{\"a\":1,\"b\":\"\\u00e9\\ud83c\\udf89\"}"
        );
    }

    #[test]
    fn writes_floats_as_python_does() {
        for (value, expected) in [
            (1e16, "1e+16"),
            (1e15, "1000000000000000.0"),
            (1.5e-5, "1.5e-05"),
            (0.0001, "0.0001"),
            (1e-7, "1e-07"),
            (0.1, "0.1"),
            (-0.0, "-0.0"),
            (1.7976931348623157e308, "1.7976931348623157e+308"),
            (123456.789, "123456.789"),
        ] {
            assert_eq!(python_float(value), expected);
        }
    }
}
