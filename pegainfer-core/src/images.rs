//! Images in prompts: their places, their keys in the prefix index, and the rotary positions of tokens.
//!
//! An image takes consecutive tokens of the prompt, all with the same id; the rows of the model's image encoder replace
//! their embeddings. Everything here is a function of the request, so a preempted request and a continued conversation
//! find the same positions and keys again.

use std::ops::Range;
use std::sync::Arc;

/// Pixels of a side of a patch.
const PATCH: usize = 16;
/// Patches of a side of the square that is one token.
const MERGE: usize = 2;
/// Largest number of patches of a side.
const MAX_SIDE: usize = 4096;
/// Largest number of tokens of an image; what encodes images has memory for these.
pub const MAX_TOKENS: usize = 4096;

/// Bit of a key that stands for a token of an image. No vocabulary has ids with this bit.
pub const IMAGE_KEY: u32 = 1 << 31;

/// A decoded and resized image.
#[derive(Debug, PartialEq, Eq)]
pub struct Image {
    grid: (usize, usize),
    pixels: Arc<[u8]>,
    hash: [u8; 32],
}

impl Image {
    /// An image of `rows` and `columns` patches of 16 x 16 pixels, both even and at most 4096, from its RGB bytes, rows
    /// of pixels from top to bottom. `None` if the bytes are not those of such an image, or for more than [`MAX_TOKENS`]
    /// tokens.
    pub fn new((rows, columns): (usize, usize), pixels: impl Into<Arc<[u8]>>) -> Option<Self> {
        let pixels = pixels.into();
        if !is_shape((rows, columns)) || pixels.len() != rows * columns * PATCH * PATCH * 3 {
            return None;
        }
        let mut hasher = blake3::Hasher::new();
        // The same bytes in another shape are another image.
        hasher.update(&(rows as u64).to_le_bytes()).update(&(columns as u64).to_le_bytes()).update(&pixels);
        Some(Self { grid: (rows, columns), pixels, hash: *hasher.finalize().as_bytes() })
    }

    /// An image with its shape and hash but no pixels, for replays of a schedule. `None` as [`new`](Self::new).
    pub fn without_pixels(grid: (usize, usize), hash: [u8; 32]) -> Option<Self> {
        is_shape(grid).then(|| Self { grid, pixels: Arc::default(), hash })
    }

    /// An image of the same shape whose pixels depend on the hash only, in place of one without pixels.
    pub fn stand_in(&self) -> Option<Self> {
        let mut pixels = vec![0; self.grid.0 * self.grid.1 * PATCH * PATCH * 3];
        blake3::Hasher::new_keyed(&self.hash).finalize_xof().fill(&mut pixels);
        Self::new(self.grid, pixels)
    }

    /// Rows and columns of patches.
    pub fn grid(&self) -> (usize, usize) {
        self.grid
    }

    /// RGB bytes, `[16 rows, 16 columns, 3]`.
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    /// BLAKE3 of the grid and the pixels: images with the same hash are the same.
    pub fn hash(&self) -> &[u8; 32] {
        &self.hash
    }

    /// Rows and columns of tokens.
    fn token_grid(&self) -> (usize, usize) {
        (self.grid.0 / MERGE, self.grid.1 / MERGE)
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        let (rows, columns) = self.token_grid();
        rows * columns
    }

    /// Number of positions that the text after it moves on.
    fn extent(&self) -> usize {
        let (rows, columns) = self.token_grid();
        rows.max(columns)
    }
}

/// True if an image may have these rows and columns of patches.
fn is_shape((rows, columns): (usize, usize)) -> bool {
    let fits = |side: usize| (1..=MAX_SIDE).contains(&side) && side.is_multiple_of(MERGE);
    fits(rows) && fits(columns) && rows * columns <= MAX_TOKENS * MERGE * MERGE
}

/// A hash as render routes and KV events write it: 64 hexadecimal digits.
pub fn hex(hash: &[u8; 32]) -> String {
    blake3::Hash::from_bytes(*hash).to_hex().to_string()
}

/// An image at its place in a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageSpan {
    /// Index of its first token in the prompt.
    pub start: usize,
    /// The image.
    pub image: Arc<Image>,
}

impl ImageSpan {
    /// Its tokens.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.image.tokens()
    }
}

/// Rows of an image that replace embeddings of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepImage {
    /// Index of the first token of the step.
    pub first: usize,
    /// Rows of the image, one for each token.
    pub rows: Range<usize>,
    /// The image.
    pub image: Arc<Image>,
}

/// Why images do not fit a prompt, as the end of a sentence.
pub fn check(spans: &[ImageSpan], prompt: &[u32], token: u32) -> Result<(), &'static str> {
    check_places(spans, prompt.len())?;
    let mut tokens = spans.iter().flat_map(|span| &prompt[span.range()]);
    if tokens.all(|id| *id == token) { Ok(()) } else { Err("a token of one is not the model's image token") }
}

/// Why images do not fit a prompt of `len` tokens, whatever its tokens are.
pub fn check_places(spans: &[ImageSpan], len: usize) -> Result<(), &'static str> {
    let mut end = 0;
    for ImageSpan { start, image } in spans {
        if *start < end {
            return Err("they overlap, or are not in the order of the prompt");
        }
        end = start.saturating_add(image.tokens());
        if end > len {
            return Err("one ends after the prompt");
        }
    }
    Ok(())
}

/// Time, row and column of the token at `index` for rotary embeddings of three axes (M-RoPE, Qwen2-VL): equal for text,
/// which goes on after the longer side of each image before it.
pub fn rope_position(spans: &[ImageSpan], index: usize) -> [u32; 3] {
    let mut position = index;
    for span in spans.iter().take_while(|span| span.start <= index) {
        let inside = index - span.start;
        if inside < span.image.tokens() {
            let columns = span.image.token_grid().1;
            let first = position - inside;
            return [first, first + inside / columns, first + inside % columns].map(|p| p as u32);
        }
        position = position + span.image.extent() - span.image.tokens();
    }
    [position as u32; 3]
}

/// The image rows that the tokens `range` of a prompt take. `range.start` is token `first` of the step.
pub fn parts(spans: &[ImageSpan], range: Range<usize>, first: usize) -> impl Iterator<Item = StepImage> {
    spans.iter().filter_map(move |span| {
        let own = span.range();
        let common = own.start.max(range.start)..own.end.min(range.end);
        let rows = common.start.checked_sub(own.start)?..common.end.checked_sub(own.start)?;
        let image = span.image.clone();
        (!common.is_empty()).then(|| StepImage { first: first + common.start - range.start, rows, image })
    })
}

/// What the prefix index compares instead of the tokens of a prompt: tokens of images become [`IMAGE_KEY`] with the
/// image's `number`. Ends before the first image without a number.
pub fn keys(spans: &[ImageSpan], prompt: &[u32], mut number: impl FnMut(&[u8; 32]) -> Option<u32>) -> Vec<u32> {
    let mut keys = Vec::with_capacity(prompt.len());
    for span in spans {
        keys.extend_from_slice(&prompt[keys.len()..span.start]);
        let Some(number) = number(span.image.hash()) else { return keys };
        keys.resize(span.range().end, IMAGE_KEY | number);
    }
    keys.extend_from_slice(&prompt[keys.len()..]);
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(rows: usize, columns: usize, colour: u8) -> Arc<Image> {
        Arc::new(Image::new((rows, columns), vec![colour; rows * columns * 768]).unwrap())
    }

    #[test]
    fn an_image_is_its_pixels_and_its_shape() {
        assert_ne!(image(2, 4, 1).hash(), image(4, 2, 1).hash());
        assert_ne!(image(2, 4, 1).hash(), image(2, 4, 2).hash());
        assert_eq!(image(2, 4, 1), image(2, 4, 1));
        for (grid, bytes) in [((2, 3), 6 * 768), ((0, 2), 0), ((2, 2), 4 * 768 + 1), ((4098, 2), 8196 * 768)] {
            assert!(Image::new(grid, vec![0; bytes]).is_none(), "{grid:?}");
        }
    }

    #[test]
    fn stand_ins_differ_as_the_images_they_stand_for() {
        let stand_in = |hash| Image::without_pixels((4, 2), [hash; 32]).unwrap().stand_in().unwrap();
        assert_eq!(stand_in(1), stand_in(1));
        assert_ne!(stand_in(1).hash(), stand_in(2).hash());
        for grid in [(3, 2), (0, 2), (4096, 4096), (usize::MAX, 2)] {
            assert!(Image::without_pixels(grid, [1; 32]).is_none(), "{grid:?}");
        }
    }

    #[test]
    fn positions_follow_rows_and_columns_and_text_the_longer_side() {
        let spans = [(2, image(4, 6, 1)), (9, image(8, 2, 2))].map(|(start, image)| ImageSpan { start, image });
        let positions: Vec<[u32; 3]> = (0..15).map(|i| rope_position(&spans, i)).collect();
        assert_eq!(positions[..3], [[0; 3], [1; 3], [2; 3]]);
        assert_eq!(positions[3..8], [[2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]]);
        assert_eq!(positions[8], [5; 3]);
        assert_eq!(positions[9..13], [[6, 6, 6], [6, 7, 6], [6, 8, 6], [6, 9, 6]]);
        assert_eq!(positions[13..], [[10; 3], [11; 3]]);
        assert_eq!(rope_position(&[], 7), [7; 3]);
    }

    #[test]
    fn a_chunk_has_the_rows_of_its_tokens() {
        let spans = [(2, image(4, 6, 1)), (9, image(8, 2, 2))].map(|(start, image)| ImageSpan { start, image });
        let of = |range| {
            let parts = parts(&spans, range, 100).map(|part| (part.first, part.rows, part.image.tokens()));
            parts.collect::<Vec<_>>()
        };
        assert_eq!(of(0..20), [(102, 0..6, 6), (109, 0..4, 4)]);
        assert_eq!(of(4..11), [(100, 2..6, 6), (105, 0..2, 4)]);
        assert_eq!((of(0..2), of(8..9), of(13..40)), (vec![], vec![], vec![]));
    }

    #[test]
    fn keys_tell_images_apart_and_end_before_an_unknown_one() {
        let spans = [(1, image(2, 4, 1)), (4, image(2, 2, 2))].map(|(start, image)| ImageSpan { start, image });
        let prompt = [7, 9, 9, 8, 9, 6];
        let mut next = 0;
        let mut number = |_: &[u8; 32]| {
            next += 1;
            Some(next)
        };
        assert_eq!(keys(&spans, &prompt, &mut number), [7, IMAGE_KEY | 1, IMAGE_KEY | 1, 8, IMAGE_KEY | 2, 6]);
        let second = *spans[1].image.hash();
        assert_eq!(keys(&spans, &prompt, |hash| (*hash != second).then_some(5)), [7, IMAGE_KEY | 5, IMAGE_KEY | 5, 8]);
        assert_eq!(keys(&[], &prompt, |_| None), prompt);
    }

    #[test]
    fn images_that_do_not_fit_are_refused() {
        let span = |start, image| ImageSpan { start, image };
        let prompt = [7, 9, 9, 8, 9, 6];
        let wide = image(2, 4, 1);
        assert_eq!(check(&[span(1, wide.clone()), span(4, image(2, 2, 1))], &prompt, 9), Ok(()));
        for (spans, words) in [
            (vec![span(0, wide.clone())], "not the model's image token"),
            (vec![span(5, wide.clone())], "after the prompt"),
            (vec![span(4, image(2, 2, 1)), span(1, wide.clone())], "order"),
            (vec![span(1, wide.clone()), span(2, image(2, 2, 1))], "overlap"),
        ] {
            assert!(check(&spans, &prompt, 9).unwrap_err().contains(words), "{words}");
        }
    }
}
