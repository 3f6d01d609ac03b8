//! Reads the part of a stored tensor that fills rows of a loaded one.

use super::request::Request;
use super::shared::{Reads, Span};
use crate::weights::block_scales::check_codes;
use crate::weights::error::{WeightsError, named};
use crate::weights::feed::Feed;
use crate::weights::stored::Stored;

/// An E8M0 scale that is no number.
const E8M0_NAN: u8 = 255;

/// Condition for the bytes of a part.
#[derive(Debug, Clone, Copy)]
pub(in crate::weights) enum Check {
    /// None.
    Any,
    /// No e4m3 code is NaN.
    Codes,
    /// No E8M0 scale is NaN.
    E8m0,
    /// u32 numbers are below this.
    Below(usize),
}

impl Check {
    fn of(self, name: &str, bytes: &[u8]) -> Result<(), WeightsError> {
        let wrong =
            |found: String, expected: String| Err(WeightsError::Mismatch { name: name.to_owned(), found, expected });
        match self {
            Self::Any => Ok(()),
            Self::Codes => check_codes(name, bytes),
            Self::E8m0 if bytes.contains(&E8M0_NAN) => {
                wrong("F8_E8M0 with a scale that is not a number".to_owned(), "scales of 2^-127 to 2^127".to_owned())
            }
            Self::E8m0 => Ok(()),
            Self::Below(limit) => {
                let numbers = bytes.as_chunks().0.iter().map(|number| u32::from_le_bytes(*number));
                match numbers.max().filter(|largest| *largest as usize >= limit) {
                    Some(largest) => wrong(format!("I64 with number {largest}"), format!("numbers below {limit}")),
                    None => Ok(()),
                }
            }
        }
    }
}

/// Reads a [`Request`]: rows that other ranks need as well from the feed, all others from the file.
#[derive(Debug)]
pub(in crate::weights) struct PartReader<'a> {
    request: Request<'a>,
    /// The part of the stored tensor.
    part: Stored<'a>,
    check: Check,
    /// Rows that come from the feed, ascending.
    shared: Option<(&'a Feed<'a>, &'a [Span])>,
}

impl<'a> PartReader<'a> {
    /// A reader of the next request of `reads`.
    pub fn new(request: Request<'a>, check: Check, reads: &mut Reads<'a>) -> Self {
        let element = request.stored.element();
        let columns = request.columns.start / element..request.columns.end / element;
        let part = request.stored.part(request.row / element, request.rows.clone(), columns);
        let shared = reads.next(&request.name);
        Self { request, part, check, shared }
    }

    /// True if some rows come from the feed, so that the bytes must be read in order.
    pub fn is_shared(&self) -> bool {
        self.shared.is_some_and(|(_, spans)| !spans.is_empty())
    }

    /// Reads `out.len()` bytes of the part from byte `first` on, and checks them.
    pub fn read(&self, first: usize, out: &mut [u8]) -> Result<(), WeightsError> {
        self.fill(first, out).map_err(|error| named(&self.request.name, error))?;
        self.check.of(&self.request.name, out)
    }

    fn fill(&self, mut first: usize, mut out: &mut [u8]) -> Result<(), WeightsError> {
        let Request { rows, columns, .. } = &self.request;
        let Some((feed, spans)) = self.shared else { return self.part.read(first, out) };
        while !out.is_empty() {
            let row = rows.start + first / columns.len();
            let span = spans.get(spans.partition_point(|span| span.rows.end <= row));
            let (end, taken) = match span {
                Some(span) if span.rows.start <= row => (span.rows.end, Some(span)),
                Some(span) => (span.rows.start, None),
                None => (rows.end, None),
            };
            let bytes = out.len().min((end - rows.start) * columns.len() - first);
            let (now, rest) = out.split_at_mut(bytes);
            match taken {
                Some(span) => feed.take(span.chunk, bytes, |chunk| self.copy(span, chunk, first, now))?,
                None => self.part.read(first, now)?,
            }
            first += bytes;
            out = rest;
        }
        Ok(())
    }

    /// Copies the bytes of the part from byte `first` on from a chunk with the rows of `span`.
    fn copy(&self, span: &Span, chunk: &[u8], first: usize, mut out: &mut [u8]) {
        let Request { row, rows, columns, .. } = &self.request;
        // From the first row of the chunk on.
        let mut at = (rows.start * columns.len() + first) - span.rows.start * columns.len();
        if columns.len() == *row {
            return out.copy_from_slice(&chunk[at..][..out.len()]);
        }
        while !out.is_empty() {
            let (i, skipped) = (at / columns.len(), at % columns.len());
            let (of_row, rest) = out.split_at_mut((columns.len() - skipped).min(out.len()));
            of_row.copy_from_slice(&chunk[i * row + columns.start + skipped..][..of_row.len()]);
            at += of_row.len();
            out = rest;
        }
    }
}
