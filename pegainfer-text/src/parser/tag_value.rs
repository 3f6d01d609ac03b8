//! A value between Qwen3.5's tags. It becomes a member of the arguments.

use super::arguments::Arguments;
use super::cursor::Cursor;
use super::output::EventCollector;
use super::parameter::Parameter;
use super::value_end::{EndSearch, ValueEnd, without_partial_tag};

/// A value that is being read. One line break at its start and one at its end are not part of it.
#[derive(Debug)]
pub struct TagValue {
    parameter: Parameter,
    /// True if the leading line break has not been read yet.
    opening: bool,
    /// True if nothing of the value has been read yet.
    fresh: bool,
    /// Number of opening tags that are part of the value.
    nested: usize,
}

impl TagValue {
    /// The value of a parameter, after its opening tag.
    pub fn new(parameter: Parameter) -> Self {
        Self { parameter, opening: true, fresh: true, nested: 0 }
    }

    /// Reads as far as the text goes; true at the end of the value. `keys` are the parameters of the function.
    pub fn read<'a>(
        &mut self,
        cursor: &mut Cursor,
        keys: impl Fn() -> Vec<&'a str>,
        arguments: &Arguments,
        out: &mut EventCollector,
    ) -> bool {
        if self.opening {
            let Some(byte) = cursor.peek() else { return false };
            cursor.at = usize::from(byte == b'\n');
            cursor.take();
            self.opening = false;
        }
        let found = self.search(cursor, keys, arguments);
        if matches!(found, ValueEnd::After(_)) && cursor.ended {
            return false;
        }
        let (ValueEnd::At(end, _) | ValueEnd::After(end)) = found;
        // Hold back a line break until it is known whether it is the last one.
        let text = &cursor.text[..end];
        let text = text.strip_suffix('\n').unwrap_or(text);
        self.parameter.push(text, arguments, out);
        self.fresh &= text.is_empty();
        cursor.at = match found {
            ValueEnd::At(end, tag) => end + tag,
            ValueEnd::After(_) => text.len(),
        };
        cursor.take();
        matches!(found, ValueEnd::At(..))
    }

    fn search<'a>(&mut self, cursor: &Cursor, keys: impl Fn() -> Vec<&'a str>, arguments: &Arguments) -> ValueEnd {
        if !cursor.text.contains('<') {
            return ValueEnd::After(cursor.text.len());
        }
        let search = EndSearch {
            cursor,
            keys: &keys(),
            given: &|key| arguments.contains(key) || self.parameter.key == key,
            is_text: self.parameter.is_text(),
            fresh: self.fresh,
        };
        let (end, nested) = search.run(self.nested);
        self.nested = nested;
        end
    }

    /// Ends the value at a tag.
    pub fn end(self, whole: bool, arguments: &mut Arguments, out: &mut EventCollector) {
        self.parameter.end(whole, arguments, out);
    }

    /// Ends the value at the end of the output, with the text that was held back, but without a partial tag.
    pub fn cut_off(mut self, cursor: &Cursor, arguments: &mut Arguments, out: &mut EventCollector) {
        self.parameter.push(without_partial_tag(&cursor.text), arguments, out);
        self.end(false, arguments, out);
    }
}
