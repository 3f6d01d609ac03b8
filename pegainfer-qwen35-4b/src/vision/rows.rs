//! Output rows of images, kept by content: an image is encoded once for all chunks and requests that need it.

use super::config::{MAX_PATCHES, VisionConfig};
use super::layout::Image as Patches;
use super::tower::Tower;
use super::weights::VisionWeights;
use pegainfer_core::exec::Exec;
use pegainfer_core::images::{Image, StepImage};
use pegainfer_core::schedule::EncodePart;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::vision;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// Rows that there is memory for: 32 images of 1,024 tokens.
const MAX_ROWS: usize = 32_768;

/// The rows of one image.
#[derive(Debug)]
struct Kept {
    place: Place,
    /// Number of the step that last needed them.
    used: u64,
}

/// Where the rows of an image are.
#[derive(Debug)]
enum Place {
    /// In the memory for all.
    Shared(Range<usize>),
    /// In their own, `[tokens, out_hidden]` bf16.
    Own(Tensor),
}

impl Kept {
    /// Its rows of the memory for all.
    fn shared(&self) -> Option<&Range<usize>> {
        match &self.place {
            Place::Shared(range) => Some(range),
            Place::Own(_) => None,
        }
    }
}

/// The vision tower, and the rows of the images that it encoded, least recently used ones dropped first.
#[derive(Debug)]
pub struct ImageRows {
    tower: Tower,
    /// Memory of the rows, `[MAX_ROWS, out_hidden]` bf16.
    memory: Tensor,
    kept: HashMap<[u8; 32], Kept>,
    /// Hash and next part of an image that is encoded in parts.
    begun: Option<([u8; 32], usize)>,
    steps: u64,
    encoded: u64,
}

impl ImageRows {
    /// No rows yet.
    pub(crate) fn new(exec: &mut Exec, config: VisionConfig) -> std::io::Result<Self> {
        Self::with_rows(exec, config, MAX_ROWS)
    }

    fn with_rows(exec: &mut Exec, config: VisionConfig, rows: usize) -> std::io::Result<Self> {
        let tower = Tower::new(exec, config, DType::Bf16)?;
        let memory = exec.tensor("vision.kept", &[rows, config.out_hidden], DType::Bf16)?;
        Ok(Self { tower, memory, kept: HashMap::new(), begun: None, steps: 0, encoded: 0 })
    }

    /// Encodes the images of a step that have no rows, before its forward pass. Rows of other images are dropped if
    /// there is no memory left.
    pub(crate) fn prepare(
        &mut self,
        exec: &mut Exec,
        weights: &VisionWeights,
        parts: &[StepImage],
    ) -> Result<(), OpError> {
        self.steps += 1;
        // Rows with their own memory are an exception of one step.
        self.kept.retain(|_, kept| kept.shared().is_some());
        let (mut missing, mut seen) = (Vec::<&Arc<Image>>::new(), HashSet::new());
        for image in parts.iter().map(|part| &part.image).filter(|image| seen.insert(*image.hash())) {
            match self.kept.get_mut(image.hash()) {
                Some(kept) => kept.used = self.steps,
                None => missing.push(image),
            }
        }
        let mut rest = &missing[..];
        while !rest.is_empty() {
            let mut patches = 0;
            let fits = rest.iter().take_while(|image| {
                patches += image.grid().0 * image.grid().1;
                patches <= MAX_PATCHES
            });
            let (batch, later) = rest.split_at(fits.count().max(1));
            self.encode(exec, weights, batch)?;
            rest = later;
        }
        Ok(())
    }

    /// Encodes a part of an image that a later step needs. A part that does not follow the one before is left to that
    /// step.
    pub(crate) fn encode_part(
        &mut self,
        exec: &mut Exec,
        weights: &VisionWeights,
        EncodePart { image, part, parts }: &EncodePart,
    ) -> Result<(), OpError> {
        self.steps += 1;
        if let Some(kept) = self.kept.get_mut(image.hash()) {
            kept.used = self.steps;
            return Ok(());
        }
        if *part > 0 && self.begun != Some((*image.hash(), *part)) {
            return Ok(());
        }
        if *part == 0 {
            self.tower.begin(exec, weights, &[patches(image)])?;
        }
        let end = |part: usize| part * weights.blocks.len() / parts;
        self.tower.run_blocks(exec, weights, end(*part)..end(part + 1))?;
        self.begun = (part + 1 < *parts).then(|| (*image.hash(), part + 1));
        if self.begun.is_some() {
            return Ok(());
        }
        self.tower.finish(exec, weights)?;
        self.keep(exec, &[image])
    }

    fn encode(&mut self, exec: &mut Exec, weights: &VisionWeights, images: &[&Arc<Image>]) -> Result<(), OpError> {
        let patches: Vec<Patches<'_>> = images.iter().map(|image| patches(image)).collect();
        self.begun = None;
        self.tower.forward(exec, weights, &patches)?;
        self.keep(exec, images)
    }

    /// Keeps the rows of the images that the tower has just encoded.
    fn keep(&mut self, exec: &mut Exec, images: &[&Arc<Image>]) -> Result<(), OpError> {
        let mut first = 0;
        for image in images {
            let own = first..first + image.tokens();
            first = own.end;
            let place = match self.make_place(own.len()) {
                Some(range) => {
                    vision::copy_rows(exec, self.tower.rows(), own, &mut self.memory, range.start)?;
                    Place::Shared(range)
                }
                None => {
                    let no_memory = |e| OpError { op: "image rows", message: format!("no memory for {own:?}: {e}") };
                    let shape = [own.len(), self.memory.rows_cols().1];
                    let mut rows = exec.tensor("vision.rows", &shape, DType::Bf16).map_err(no_memory)?;
                    vision::copy_rows(exec, self.tower.rows(), own, &mut rows, 0)?;
                    Place::Own(rows)
                }
            };
            self.kept.insert(*image.hash(), Kept { place, used: self.steps });
            self.encoded += 1;
        }
        Ok(())
    }

    /// Memory for so many rows; rows that this step does not need are dropped for it. `None` if the step's own take all.
    fn make_place(&mut self, rows: usize) -> Option<Range<usize>> {
        loop {
            if let Some(place) = self.gap(rows) {
                return Some(place);
            }
            let older = self.kept.iter().filter(|(_, kept)| kept.used < self.steps);
            let (hash, used) = older.map(|(hash, kept)| (*hash, kept.used)).min_by_key(|(_, used)| *used)?;
            log::debug!("the rows of an image that step {used} needed are dropped");
            self.kept.remove(&hash);
        }
    }

    /// The first rows of the memory that no image has.
    fn gap(&self, rows: usize) -> Option<Range<usize>> {
        let mut taken: Vec<&Range<usize>> = self.kept.values().filter_map(Kept::shared).collect();
        taken.sort_unstable_by_key(|range| range.start);
        let mut first = 0;
        for range in taken {
            if first + rows <= range.start {
                break;
            }
            first = range.end;
        }
        (first + rows <= self.memory.max_rows()).then(|| first..first + rows)
    }

    /// Writes the rows of a step's images over the embeddings of its tokens, `[tokens, out_hidden]` bf16.
    pub(crate) fn replace(&self, exec: &mut Exec, parts: &[StepImage], embedded: &mut Tensor) -> Result<(), OpError> {
        for StepImage { first, rows, image } in parts {
            let missing = || OpError { op: "image rows", message: "an image of the step was not encoded".to_owned() };
            let (from, start) = match &self.kept.get(image.hash()).ok_or_else(missing)?.place {
                Place::Shared(range) => (&self.memory, range.start),
                Place::Own(tensor) => (tensor, 0),
            };
            vision::copy_rows(exec, from, start + rows.start..start + rows.end, embedded, *first)?;
        }
        Ok(())
    }

    /// Number of images encoded so far.
    pub fn encoded(&self) -> u64 {
        self.encoded
    }
}

/// An image as the tower takes it.
fn patches(image: &Image) -> Patches<'_> {
    Patches { grid: image.grid(), pixels: image.pixels() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_core::isa::Isa;
    use pegainfer_core::weights::{Loader, Source};
    use pegainfer_kernels::ops;

    const CONFIG: VisionConfig =
        VisionConfig { depth: 2, hidden: 32, heads: 2, intermediate: 48, out_hidden: 16, side: 4, image_token: 9 };

    /// Rows that replace a step's embeddings, each image whole.
    fn embed(rows: &mut ImageRows, exec: &mut Exec, weights: &VisionWeights, images: &[&Arc<Image>]) -> Vec<u16> {
        let mut first = 0;
        let part = |image: &&Arc<Image>| {
            first += image.tokens();
            StepImage { first: first - image.tokens(), rows: 0..image.tokens(), image: (*image).clone() }
        };
        let parts: Vec<StepImage> = images.iter().map(part).collect();
        let mut embedded = exec.tensor("embedded", &[first, CONFIG.out_hidden], DType::Bf16).unwrap();
        rows.prepare(exec, weights, &parts).unwrap();
        rows.replace(exec, &parts, &mut embedded).unwrap();
        embedded.host::<half::bf16>().iter().map(|x| x.to_bits()).collect()
    }

    fn weights(exec: &mut Exec) -> VisionWeights {
        let source = Source::Dummy { seed: 1, std: 0.1, uniform: ops::uniform, random_bytes: ops::random_bytes };
        Loader::run(exec, &source, &mut |_| {}, |loader| VisionWeights::load(loader, &CONFIG)).unwrap()
    }

    fn image(colour: u8) -> Arc<Image> {
        let pixels: Vec<u8> = (0..8 * 768).map(|i| (i as u8).wrapping_mul(colour)).collect();
        Arc::new(Image::new((2, 4), pixels).unwrap())
    }

    #[test]
    fn images_are_encoded_once_until_the_oldest_are_dropped() {
        let mut exec = Exec::cpu(Isa::best(), Some(1)).unwrap();
        let weights = weights(&mut exec);
        let [a, b, c] = [1, 3, 7].map(image);
        // Memory for two images: each has two rows.
        let mut rows = ImageRows::with_rows(&mut exec, CONFIG, 5).unwrap();
        let both = embed(&mut rows, &mut exec, &weights, &[&a, &b, &a]);
        assert_eq!(rows.encoded(), 2, "an image twice in a step is encoded once");
        let one = both.len() / 3;
        assert!(both[..one] == both[2 * one..] && both[..one] != both[one..2 * one]);
        assert_eq!(embed(&mut rows, &mut exec, &weights, &[&a]), both[..one]);
        embed(&mut rows, &mut exec, &weights, &[&c]);
        assert_eq!((rows.encoded(), rows.kept.len(), rows.kept.contains_key(b.hash())), (3, 2, false));
        assert_eq!(embed(&mut rows, &mut exec, &weights, &[&b, &a]), [&both[one..2 * one], &both[..one]].concat());
        assert_eq!(rows.encoded(), 4);
        // A step may need more than fits.
        let all = embed(&mut rows, &mut exec, &weights, &[&a, &b, &c]);
        assert_eq!((rows.kept.len(), &all[..2 * one]), (3, &both[..2 * one]));
        embed(&mut rows, &mut exec, &weights, &[&a]);
        assert_eq!(rows.kept.len(), 2, "what had its own memory is dropped");
    }

    #[test]
    fn an_image_in_parts_has_the_same_rows_and_parts_out_of_order_are_left_out() {
        let mut exec = Exec::cpu(Isa::best(), Some(1)).unwrap();
        let weights = weights(&mut exec);
        let [a, b] = [1, 3].map(image);
        let mut whole = ImageRows::with_rows(&mut exec, CONFIG, 5).unwrap();
        let expected = embed(&mut whole, &mut exec, &weights, &[&a]);
        for parts in [1, 2, 3] {
            let mut rows = ImageRows::with_rows(&mut exec, CONFIG, 5).unwrap();
            let part = |image: &Arc<Image>, part| EncodePart { image: image.clone(), part, parts };
            for i in 0..parts {
                assert_eq!(rows.encoded(), 0);
                rows.encode_part(&mut exec, &weights, &part(&a, i)).unwrap();
            }
            assert_eq!((rows.encoded(), embed(&mut rows, &mut exec, &weights, &[&a])), (1, expected.clone()));
            assert_eq!(rows.encoded(), 1, "the step finds the rows");
            if parts == 1 {
                continue;
            }
            // Another image takes the tower in between.
            let mut rows = ImageRows::with_rows(&mut exec, CONFIG, 5).unwrap();
            rows.encode_part(&mut exec, &weights, &part(&a, 0)).unwrap();
            embed(&mut rows, &mut exec, &weights, &[&b]);
            rows.encode_part(&mut exec, &weights, &part(&a, 1)).unwrap();
            assert_eq!((rows.encoded(), rows.kept.contains_key(a.hash())), (1, false));
            assert_eq!(embed(&mut rows, &mut exec, &weights, &[&a]), expected);
        }
    }
}
