//! Encoding of images ahead of their tokens: while sequences decode, a part of one image in each step, so that none of
//! them waits for a whole image.
//!
//! A part is only work done early. The model encodes every image that a step needs and that has no rows, so nothing
//! depends on a part that did not run, or on rows that were dropped.

use crate::images::{Image, ImageSpan};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Tokens of an image for each of its parts. An image of at most that many is encoded by the step that has them.
const PART_TOKENS: usize = 256;
/// Images that are remembered as encoded.
const REMEMBERED: usize = 256;

/// A part of the work of encoding an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodePart {
    /// The image.
    pub image: Arc<Image>,
    /// Number of the part.
    pub part: usize,
    /// Number of parts.
    pub parts: usize,
}

/// Which images are encoded, as far as the scheduler knows.
#[derive(Debug, Default)]
pub(super) struct Encoding {
    /// True if the step that is planned encodes at most one part.
    in_parts: bool,
    /// The part of that step.
    part: Option<EncodePart>,
    /// The next part of an image that was begun.
    next: Option<EncodePart>,
    /// Hashes of encoded images, newest last.
    encoded: VecDeque<[u8; 32]>,
}

impl Encoding {
    /// Begins a plan. `in_parts`: true if sequences of the step decode.
    pub fn begin(&mut self, in_parts: bool) {
        (self.in_parts, self.part) = (in_parts, None);
    }

    /// The part that the planned step encodes.
    pub fn take_part(&mut self) -> Option<EncodePart> {
        self.part.take()
    }

    /// End of the tokens of `range` that can be computed: they stop before the first image that is not encoded, which
    /// gets the step's part unless another image has it.
    pub fn ready(&mut self, spans: &[ImageSpan], range: Range<usize>) -> usize {
        if !self.in_parts {
            return range.end;
        }
        let is_needed = |span: &&ImageSpan| {
            let own = span.range();
            own.start < range.end && own.end > range.start && own.len() > PART_TOKENS
        };
        let missing = spans.iter().filter(is_needed).find(|span| !self.encoded.contains(span.image.hash()));
        let Some(ImageSpan { start, image }) = missing else { return range.end };
        if self.part.is_none() {
            self.encode(image);
        }
        range.start.max(*start)
    }

    /// Makes the next part of an image that of the step.
    fn encode(&mut self, image: &Arc<Image>) {
        let begun = self.next.take().filter(|next| next.image.hash() == image.hash());
        let parts = image.tokens().div_ceil(PART_TOKENS);
        let part = begun.unwrap_or_else(|| EncodePart { image: image.clone(), part: 0, parts });
        if part.part + 1 < parts {
            self.next = Some(EncodePart { part: part.part + 1, ..part.clone() });
        } else {
            if self.encoded.len() == REMEMBERED {
                self.encoded.pop_front();
            }
            self.encoded.push_back(*image.hash());
        }
        self.part = Some(part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A square image of `side * side` tokens.
    fn span(start: usize, side: usize, colour: u8) -> ImageSpan {
        let pixels = vec![colour; (2 * side * 16).pow(2) * 3];
        ImageSpan { start, image: Arc::new(Image::new((2 * side, 2 * side), pixels).unwrap()) }
    }

    fn plan(encoding: &mut Encoding, spans: &[ImageSpan], range: Range<usize>) -> (usize, Option<(usize, usize)>) {
        encoding.begin(true);
        let end = encoding.ready(spans, range);
        (end, encoding.take_part().map(|part| (part.part, part.parts)))
    }

    #[test]
    fn tokens_wait_for_all_parts_of_their_image() {
        let mut encoding = Encoding::default();
        // Of 900 tokens, so four parts, and of 256, which is encoded by its own step.
        let spans = [span(10, 30, 1), span(1000, 16, 2)];
        assert_eq!(plan(&mut encoding, &spans, 0..10), (10, None), "text before it does not wait");
        assert_eq!(plan(&mut encoding, &spans, 0..1500), (10, Some((0, 4))));
        for part in 1..4 {
            assert_eq!(plan(&mut encoding, &spans, 10..500), (10, Some((part, 4))));
        }
        assert_eq!(plan(&mut encoding, &spans, 10..1500), (1500, None));
        // Its last tokens, in another request.
        assert_eq!(plan(&mut encoding, &spans, 909..920), (920, None));
        encoding.begin(false);
        assert_eq!(encoding.ready(&[span(0, 40, 3)], 0..2000), 2000, "nobody decodes");
    }

    #[test]
    fn a_step_has_one_part_and_an_image_that_was_left_begins_again() {
        let mut encoding = Encoding::default();
        let (first, second) = ([span(0, 20, 1)], [span(4, 20, 2)]);
        encoding.begin(true);
        assert_eq!((encoding.ready(&first, 0..50), encoding.ready(&second, 0..50)), (0, 4));
        assert_eq!(encoding.take_part().map(|part| part.image), Some(first[0].image.clone()));
        // The first request is gone.
        for part in 0..2 {
            assert_eq!(plan(&mut encoding, &second, 4..50), (4, Some((part, 2))));
        }
        assert_eq!(plan(&mut encoding, &second, 4..50), (50, None));
        assert_eq!(plan(&mut encoding, &first, 0..50), (0, Some((0, 2))));
    }
}
