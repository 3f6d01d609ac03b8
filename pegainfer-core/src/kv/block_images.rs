//! The images of blocks, which are part of their names.

use crate::images::ImageSpan;
use std::ops::Range;
use std::sync::Arc;

/// An image with tokens in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockImage {
    /// Hash of its grid and pixels; see [`Image::hash`](crate::images::Image::hash).
    pub hash: [u8; 32],
    /// Index of its first token, counted from the first token of the block. Negative if it begins in an earlier block.
    pub offset: i64,
}

/// The images of one block, in the order of their tokens; `None` without one.
pub type BlockImages = Option<Arc<[BlockImage]>>;

/// The images of the block of these `tokens` of a prompt.
pub(super) fn images_of(spans: &[ImageSpan], tokens: Range<usize>) -> BlockImages {
    let first = spans.partition_point(|span| span.range().end <= tokens.start);
    let image =
        |span: &ImageSpan| BlockImage { hash: *span.image.hash(), offset: span.start as i64 - tokens.start as i64 };
    let images: Arc<[BlockImage]> =
        spans[first..].iter().take_while(|span| span.start < tokens.end).map(image).collect();
    (!images.is_empty()).then_some(images)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::images::{Image, keys};
    use crate::kv::{BlockPool, BlockTable, ContentName, Naming};

    /// An image of this number of tokens in a row.
    pub(in crate::kv) fn span(start: usize, tokens: usize, colour: u8) -> ImageSpan {
        let image = Image::new((2, 2 * tokens), vec![colour; 4 * tokens * 768]).unwrap();
        ImageSpan { start, image: Arc::new(image) }
    }

    /// Names of the blocks of a prompt with images.
    fn names(pool: &BlockPool, prompt: &[u32], images: &[ImageSpan]) -> Vec<ContentName> {
        let keys = keys(images, prompt, |hash| pool.number_image(hash));
        let mut table = BlockTable::new(pool, 0).with_images(images.into());
        table.match_prefix(&keys);
        table.grow(keys.len()).unwrap();
        table.register(&keys);
        table.names().to_vec()
    }

    #[test]
    fn names_are_equal_in_pools_that_saw_images_in_other_orders() {
        // Text and images of 6 tokens in blocks of 4. The last block, of text, has a name by what is before it.
        let prompt: Vec<u32> = [1, 2].into_iter().chain([9; 6]).chain(3..11).collect();
        let prompts = [vec![span(2, 6, 1)], vec![span(2, 6, 2)], vec![span(2, 3, 1), span(5, 3, 2)], Vec::new()];
        let pool = || {
            let pool = BlockPool::new(64, 4);
            pool.name_blocks(Naming::new(&[1; 32], "a model"));
            pool
        };
        let (first, second) = (pool(), pool());
        let there: Vec<_> = prompts.iter().map(|images| names(&first, &prompt, images)).collect();
        let mut back: Vec<_> = prompts.iter().rev().map(|images| names(&second, &prompt, images)).collect();
        back.reverse();
        assert_eq!(there, back);
        let hash = prompts[0][0].image.hash();
        assert_ne!(first.image_number(hash), second.image_number(hash), "the pools number the image differently");
        assert!(there.iter().all(|names| names.len() == 4));
        for (i, names) in there.iter().enumerate() {
            let different = |other: &Vec<ContentName>| other.iter().zip(names).all(|(other, name)| other != name);
            assert!(there[..i].iter().all(different), "{i}: another image is another name");
        }
        // A later request finds the blocks, and also the names.
        assert_eq!(names(&first, &prompt, &prompts[1]), there[1]);
        // An image at another place is another prompt.
        let shifted: Vec<u32> = [1].into_iter().chain([9; 6]).chain(3..12).collect();
        assert!(names(&first, &shifted, &[span(1, 6, 1)]).iter().all(|name| !there[0].contains(name)));
    }

    #[test]
    fn a_block_has_the_images_that_overlap_it() {
        let spans = [span(2, 5, 1), span(7, 1, 2), span(12, 4, 3)];
        let of = |tokens| -> Vec<(usize, i64)> {
            let index = |image: &BlockImage| spans.iter().position(|span| *span.image.hash() == image.hash).unwrap();
            let images = images_of(&spans, tokens);
            images.iter().flat_map(|images| images.iter()).map(|image| (index(image), image.offset)).collect()
        };
        assert_eq!(of(0..4), [(0, 2)]);
        assert_eq!(of(4..8), [(0, -2), (1, 3)]);
        assert_eq!(of(12..16), [(2, 0)]);
        assert_eq!((images_of(&spans, 0..2), images_of(&spans, 8..12), images_of(&spans, 16..20)), (None, None, None));
    }
}
