//! Output rows of images, kept by content: an image is encoded once for all chunks and requests that need it.

use super::config::VisionConfig;
use super::layout::Image as Patches;
use super::tower::Tower;
use super::weights::VisionWeights;
use pegainfer_core::exec::Exec;
use pegainfer_core::images::{Image, StepImage};
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::vision;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Bytes of the rows of images that are kept: about 50 images of 4,096 tokens for the 4B.
const MAX_BYTES: u64 = 1 << 30;
/// Patches that are encoded at once, unless one image has more.
const MAX_PATCHES: usize = 16_384;

/// The rows of one image.
#[derive(Debug)]
struct Kept {
    /// `[tokens, out_hidden]` bf16.
    rows: Tensor,
    /// Number of the step that last needed them.
    used: u64,
}

/// The vision tower, and the rows of the images that it encoded, least recently used ones dropped first.
#[derive(Debug)]
pub struct ImageRows {
    tower: Tower,
    out_hidden: usize,
    kept: HashMap<[u8; 32], Kept>,
    /// Bytes of all rows.
    bytes: u64,
    max_bytes: u64,
    steps: u64,
    encoded: u64,
}

impl ImageRows {
    /// No rows yet.
    pub(crate) fn new(exec: &mut Exec, config: VisionConfig) -> std::io::Result<Self> {
        let tower = Tower::new(exec, config, DType::Bf16)?;
        let (out_hidden, kept) = (config.out_hidden, HashMap::new());
        Ok(Self { tower, out_hidden, kept, bytes: 0, max_bytes: MAX_BYTES, steps: 0, encoded: 0 })
    }

    /// Encodes the images of a step that have no rows, before its forward pass. Rows of other images are dropped if all
    /// take too much memory.
    pub(crate) fn prepare(
        &mut self,
        exec: &mut Exec,
        weights: &VisionWeights,
        parts: &[StepImage],
    ) -> Result<(), OpError> {
        self.steps += 1;
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
        self.drop_oldest();
        Ok(())
    }

    fn encode(&mut self, exec: &mut Exec, weights: &VisionWeights, images: &[&Arc<Image>]) -> Result<(), OpError> {
        let patches: Vec<Patches<'_>> =
            images.iter().map(|image| Patches { grid: image.grid(), pixels: image.pixels() }).collect();
        let all = self.tower.forward(exec, weights, &patches)?;
        let mut first = 0;
        for image in images {
            let own = first..first + image.tokens();
            first = own.end;
            let made = exec.tensor("image rows", &[own.len(), self.out_hidden], DType::Bf16);
            let no_memory = |e| OpError { op: "image rows", message: format!("no memory for {}: {e}", own.len()) };
            let mut rows = made.map_err(no_memory)?;
            vision::copy_rows(exec, all, own, &mut rows, 0)?;
            self.bytes += rows.bytes();
            self.kept.insert(*image.hash(), Kept { rows, used: self.steps });
            self.encoded += 1;
        }
        Ok(())
    }

    /// Drops rows until they fit, but none of the current step.
    fn drop_oldest(&mut self) {
        while self.bytes > self.max_bytes {
            let older = self.kept.iter().filter(|(_, kept)| kept.used < self.steps);
            let Some((hash, used)) = older.map(|(hash, kept)| (*hash, kept.used)).min_by_key(|(_, used)| *used) else {
                return;
            };
            log::debug!("the rows of an image that step {used} needed are dropped");
            self.bytes -= self.kept.remove(&hash).map_or(0, |kept| kept.rows.bytes());
        }
    }

    /// Writes the rows of a step's images over the embeddings of its tokens, `[tokens, out_hidden]` bf16.
    pub(crate) fn replace(&self, exec: &mut Exec, parts: &[StepImage], embedded: &mut Tensor) -> Result<(), OpError> {
        for StepImage { first, rows, image } in parts {
            let missing = || OpError { op: "image rows", message: "an image of the step was not encoded".to_owned() };
            let kept = self.kept.get(image.hash()).ok_or_else(missing)?;
            vision::copy_rows(exec, &kept.rows, rows.clone(), embedded, *first)?;
        }
        Ok(())
    }

    /// Number of images encoded so far.
    pub fn encoded(&self) -> u64 {
        self.encoded
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_core::isa::Isa;
    use pegainfer_core::weights::{Loader, Source};
    use pegainfer_kernels::ops;

    const CONFIG: VisionConfig =
        VisionConfig { depth: 1, hidden: 32, heads: 2, intermediate: 48, out_hidden: 16, side: 4, image_token: 9 };

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

    #[test]
    fn images_are_encoded_once_until_the_oldest_are_dropped() {
        let mut exec = Exec::cpu(Isa::best(), Some(1)).unwrap();
        let source = Source::Dummy { seed: 1, std: 0.1, uniform: ops::uniform, random_bytes: ops::random_bytes };
        let weights =
            Loader::run(&mut exec, &source, &mut |_| {}, |loader| VisionWeights::load(loader, &CONFIG)).unwrap();
        let image = |colour: u8| {
            let pixels: Vec<u8> = (0..8 * 768).map(|i| (i as u8).wrapping_mul(colour)).collect();
            Arc::new(Image::new((2, 4), pixels).unwrap())
        };
        let [a, b, c] = [1, 3, 7].map(image);
        let mut rows = ImageRows::new(&mut exec, CONFIG).unwrap();
        let both = embed(&mut rows, &mut exec, &weights, &[&a, &b, &a]);
        assert_eq!(rows.encoded(), 2, "an image twice in a step is encoded once");
        let one = both.len() / 3;
        assert!(both[..one] == both[2 * one..] && both[..one] != both[one..2 * one]);
        // Each has two rows of 16 values.
        rows.max_bytes = 2 * 2 * 2 * 16;
        assert_eq!(embed(&mut rows, &mut exec, &weights, &[&a]), both[..one]);
        embed(&mut rows, &mut exec, &weights, &[&c]);
        assert_eq!((rows.encoded(), rows.bytes, rows.kept.contains_key(b.hash())), (3, rows.max_bytes, false));
        assert_eq!(embed(&mut rows, &mut exec, &weights, &[&b, &a]), [&both[one..2 * one], &both[..one]].concat());
        assert_eq!(rows.encoded(), 4);
        // A step may need more than fits.
        embed(&mut rows, &mut exec, &weights, &[&a, &b, &c]);
        assert_eq!(rows.kept.len(), 3);
    }
}
