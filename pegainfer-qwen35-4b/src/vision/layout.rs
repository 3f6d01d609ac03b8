//! Places of the patches of images: where their pixels are, and their positions.
//!
//! Patches come in blocks of 2 x 2, so that four consecutive ones become one output row: by block row, block column,
//! row in the block, column in the block.

use super::config::MERGE;
use pegainfer_kernels::ops::BLOCK_SIZE;
use pegainfer_kernels::ops::vision::{Grid, PATCH};

/// Largest number of patches of a side: 65,536 pixels.
pub const MAX_SIDE: usize = 4096;

/// An image as the tower takes it.
#[derive(Debug, Clone, Copy)]
pub struct Image<'a> {
    /// Rows and columns of patches, both even, at most [`MAX_SIDE`].
    pub grid: (usize, usize),
    /// RGB bytes, rows of pixels from top to bottom: `[16 rows, 16 columns, 3]`.
    pub pixels: &'a [u8],
}

impl Image<'_> {
    /// Number of patches.
    pub fn patches(&self) -> usize {
        self.grid.0 * self.grid.1
    }

    /// Number of output rows.
    pub fn rows(&self) -> usize {
        self.patches() / (MERGE * MERGE)
    }

    /// True if the grid is even and fits, and the pixels are those of the grid.
    pub fn is_valid(&self) -> bool {
        let (rows, columns) = self.grid;
        let fits = |side: usize| side > 0 && side.is_multiple_of(MERGE) && side <= MAX_SIDE;
        fits(rows) && fits(columns) && self.pixels.len() == 3 * PATCH * PATCH * self.patches()
    }

    /// Row and column of each patch, in the order of the tower.
    fn places(&self) -> impl Iterator<Item = (usize, usize)> {
        let (rows, columns) = (self.grid.0 / MERGE, self.grid.1 / MERGE);
        let blocks = (0..rows).flat_map(move |row| (0..columns).map(move |column| (row, column)));
        blocks.flat_map(|(row, column)| {
            let inner = move |i: usize| (row * MERGE + i / MERGE, column * MERGE + i % MERGE);
            (0..MERGE * MERGE).map(inner)
        })
    }
}

/// The inputs of a forward pass over several images, patch by patch.
#[derive(Debug, Default)]
pub struct Layout {
    /// Byte of the first pixel of each patch, and bytes of a row of pixels; `[patches, 2]`.
    pub patches: Vec<u32>,
    /// Rows of the table of positions that a patch takes, `[patches, 4]`.
    pub corners: Vec<u32>,
    /// Weights of these rows, `[patches, 4]`.
    pub weights: Vec<f32>,
    /// Row and column, `[patches, 2]`.
    pub positions: Vec<u32>,
    /// Place of each patch in blocks of [`BLOCK_SIZE`], of which each image begins a new one, `[patches]`.
    pub slots: Vec<u32>,
    /// First patch of each image, and the number of patches, `[images + 1]`.
    pub indptr: Vec<u32>,
    /// Sizes of attention.
    pub sizes: Sizes,
}

/// Sizes of attention.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Sum of the squares of the images' patches.
    pub scores: u64,
    /// Blocks of patches.
    pub blocks: usize,
}

impl Layout {
    /// The layout of valid images, for a square table of positions of this `side`.
    pub fn new(images: &[Image<'_>], side: usize) -> Self {
        let (mut layout, mut first) = (Self { indptr: vec![0], ..Self::default() }, 0);
        for image in images {
            let stride = image.grid.1 * PATCH * 3;
            for (row, column) in image.places() {
                let pixel = first + row * PATCH * stride + column * PATCH * 3;
                layout.patches.extend([pixel as u32, stride as u32]);
                layout.positions.extend([row as u32, column as u32]);
                layout.interpolate(axis(row, image.grid.0, side), axis(column, image.grid.1, side), side);
            }
            first += image.pixels.len();
            layout.indptr.push((layout.positions.len() / 2) as u32);
            let slot = layout.sizes.blocks * BLOCK_SIZE;
            layout.slots.extend((slot..slot + image.patches()).map(|slot| slot as u32));
            layout.sizes.scores += (image.patches() as u64).pow(2);
            layout.sizes.blocks += Grid::blocks([image.patches()]);
        }
        layout
    }

    /// The four positions around a patch.
    fn interpolate(&mut self, (row, down): (usize, f32), (column, right): (usize, f32), side: usize) {
        let (below, beyond) = ((row + 1).min(side - 1), (column + 1).min(side - 1));
        let around = [(row, column), (row, beyond), (below, column), (below, beyond)];
        self.corners.extend(around.map(|(row, column)| (row * side + column) as u32));
        let (up, left) = (1.0 - down, 1.0 - right);
        self.weights.extend([up * left, up * right, down * left, down * right]);
    }
}

/// Coordinate of patch `i` of `count` in a table of `side` positions, whose ends are those of the image: the position
/// before it, and the fraction after that.
fn axis(i: usize, count: usize, side: usize) -> (usize, f32) {
    let at = (i * (side - 1)) as f32 / (count.max(2) - 1) as f32;
    (at as usize, at.fract())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_come_in_blocks_and_images_one_after_the_other() {
        let (small, wide) = (vec![0; 3 * 256 * 4], vec![0; 3 * 256 * 8]);
        let images = [Image { grid: (2, 2), pixels: &small }, Image { grid: (2, 4), pixels: &wide }];
        assert!(images.iter().all(Image::is_valid));
        assert!(
            !Image { grid: (2, 3), pixels: &small }.is_valid() && !Image { grid: (4, 2), pixels: &small }.is_valid()
        );
        let layout = Layout::new(&images, 3);
        assert_eq!((&layout.indptr[..], layout.sizes), (&[0, 4, 12][..], Sizes { scores: 16 + 64, blocks: 2 }));
        assert_eq!(layout.slots[3..6], [3, 16, 17], "an image begins a block");
        let positions = layout.positions.chunks(2).skip(4).map(|p| (p[0], p[1])).collect::<Vec<_>>();
        assert_eq!(positions, [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]);
        let start = small.len() as u32;
        assert_eq!(layout.patches[8..12], [start, 192, start + 48, 192]);
        assert_eq!(layout.patches[12..14], [start + 16 * 192, 192]);
        // The last patch of the wide image is the last position of the table; the one before it is a third before.
        assert_eq!((layout.corners[44], layout.weights[44]), (8, 1.0));
        assert_eq!(layout.corners[40..44], [7, 8, 7, 8]);
        let expected = [1.0 - 1.0 / 3.0, 1.0 / 3.0, 0.0, 0.0];
        assert!(layout.weights[40..44].iter().zip(expected).all(|(got, w)| (got - w).abs() < 1e-6));
    }
}
