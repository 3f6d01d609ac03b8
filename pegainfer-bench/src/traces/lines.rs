//! Lines of a file, with a bound on their length.

use std::io::{BufRead, Error, ErrorKind, Read};

/// Maximum bytes of a line: a prompt of two million token ids.
const MAX_LINE: usize = 16 << 20;

/// The lines of a file that are not blank, without their line breaks.
pub(super) struct Lines<R> {
    reader: R,
    number: usize,
}

impl<R: BufRead> Lines<R> {
    /// The lines of `reader`.
    pub fn new(reader: R) -> Self {
        Self { reader, number: 0 }
    }

    /// Number of the last line read, from 1.
    pub fn number(&self) -> usize {
        self.number
    }

    /// The next line; `None` at the end of the file. Errors of the kind `InvalidData` concern the line, others the
    /// file.
    pub fn next(&mut self) -> std::io::Result<Option<String>> {
        loop {
            let mut line = Vec::new();
            let read = self.reader.by_ref().take(MAX_LINE as u64 + 1).read_until(b'\n', &mut line)?;
            if read == 0 {
                return Ok(None);
            }
            self.number += 1;
            if read > MAX_LINE {
                return Err(invalid(format!("it is longer than {} MiB", MAX_LINE >> 20)));
            }
            let line = String::from_utf8(line).map_err(|_| invalid("it is not text in UTF-8".into()))?;
            // Some spreadsheet programs write a byte order mark.
            let line = line.strip_prefix('\u{feff}').unwrap_or(&line).trim();
            if !line.is_empty() {
                return Ok(Some(line.to_owned()));
            }
        }
    }
}

fn invalid(reason: String) -> Error {
    Error::new(ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_counted_and_bounded() {
        let mut lines = Lines::new("\u{feff}a,b\r\n\n  \n1,2\n3,4".as_bytes());
        let mut read = Vec::new();
        while let Some(line) = lines.next().unwrap() {
            read.push((lines.number(), line));
        }
        assert_eq!(read, [(1, "a,b".into()), (4, "1,2".into()), (5, "3,4".into())]);
        let long = [b"a\n".to_vec(), vec![b'x'; MAX_LINE + 1], b"\nb".to_vec()].concat();
        let mut lines = Lines::new(&long[..]);
        assert_eq!(lines.next().unwrap().unwrap(), "a");
        let error = lines.next().unwrap_err();
        assert_eq!((error.kind(), lines.number()), (ErrorKind::InvalidData, 2));
        assert_eq!(error.to_string(), "it is longer than 16 MiB");
        let fits = [vec![b'x'; MAX_LINE - 1], b"\n".to_vec()].concat();
        assert_eq!(Lines::new(&fits[..]).next().unwrap().unwrap().len(), MAX_LINE - 1);
        assert!(Lines::new(&b"\xff\n"[..]).next().unwrap_err().to_string().contains("UTF-8"));
    }
}
