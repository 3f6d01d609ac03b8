//! Content names of blocks: what routers and storage outside the device call a block.

use super::block_images::BlockImage;
use super::prefix_root::PrefixRoot;
use crate::images::IMAGE_KEY;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;
use std::num::NonZeroU128;

/// Name of a full block by its tokens and images and by everything before it: a keyed 128-bit hash. Equal prefixes of
/// one root have the same name in every pool with the same [`Naming`], also after a restart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContentName(pub NonZeroU128);

impl ContentName {
    /// From 16 bytes in big-endian order; `None` if all are 0.
    pub fn from_bytes(bytes: [u8; 16]) -> Option<Self> {
        NonZeroU128::new(u128::from_be_bytes(bytes)).map(Self)
    }

    /// Its 16 bytes, in big-endian order.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.get().to_be_bytes()
    }

    /// The last 64 bits, for protocols whose names are that short.
    pub fn low(self) -> u64 {
        self.0.get() as u64
    }
}

impl fmt::Debug for ContentName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// How blocks get their names: `name = BLAKE3(key, parent's name | tokens | hash and offset of each image)`, cut to 128
/// bits, where the first block of a sequence has the name of its root as its parent. Without the key nobody can find
/// two texts with one name.
#[derive(Debug, Clone)]
pub struct Naming {
    key: [u8; 32],
}

impl Naming {
    /// Names of blocks of `model`, a text that differs between models whose KV differs. Names made with different
    /// secrets have nothing in common.
    pub fn new(secret: &[u8; 32], model: &str) -> Self {
        Self { key: *blake3::keyed_hash(secret, model.as_bytes()).as_bytes() }
    }

    /// Names that no other process has.
    pub fn random() -> Self {
        let random = RandomState::new();
        let mut key = [0; 32];
        key.chunks_exact_mut(8)
            .zip(0u64..)
            .for_each(|(part, i)| part.copy_from_slice(&random.hash_one(i).to_le_bytes()));
        Self { key }
    }

    /// Name of the start of every sequence with this root.
    pub fn root(&self, root: PrefixRoot) -> ContentName {
        let adapter = root.adapter.map_or(0, |id| id.0.get());
        let mut bytes = [0; 12];
        bytes[..8].copy_from_slice(&root.salt.to_le_bytes());
        bytes[8..].copy_from_slice(&adapter.to_le_bytes());
        self.hash(&[&bytes])
    }

    /// Name of the block of `tokens` with these `images` that follows `parent`. Tokens of images are
    /// [keys](crate::images::keys), whose numbers do not count: they differ between pools.
    pub fn next(&self, parent: ContentName, tokens: &[u32], images: &[BlockImage]) -> ContentName {
        if !images.is_empty() {
            return self.next_with_images(parent, tokens, images);
        }
        if cfg!(target_endian = "little") {
            return self.hash(&[&parent.to_bytes(), bytemuck::cast_slice(tokens)]);
        }
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        self.hash(&[&parent.to_bytes(), &bytes])
    }

    /// Images make the hashed bytes longer than those of any block of text.
    fn next_with_images(&self, parent: ContentName, tokens: &[u32], images: &[BlockImage]) -> ContentName {
        let mut bytes = Vec::with_capacity(size_of_val(tokens) + size_of_val(images));
        for token in tokens {
            let token = if token & IMAGE_KEY == 0 { *token } else { IMAGE_KEY };
            bytes.extend(token.to_le_bytes());
        }
        for BlockImage { hash, offset } in images {
            bytes.extend(hash);
            bytes.extend(offset.to_le_bytes());
        }
        self.hash(&[&parent.to_bytes(), &bytes])
    }

    fn hash(&self, parts: &[&[u8]]) -> ContentName {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        for part in parts {
            hasher.update(part);
        }
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        // All zeros has a chance of 2^-128.
        ContentName::from_bytes(bytes).unwrap_or(ContentName(NonZeroU128::MIN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::AdapterId;
    use std::collections::HashSet;
    use std::num::NonZeroU32;

    #[test]
    fn a_name_depends_on_everything_before_the_block() {
        let of = |secret: u8, model: &str, root: PrefixRoot, texts: &[[u32; 2]]| {
            let naming = Naming::new(&[secret; 32], model);
            texts.iter().fold(naming.root(root), |parent, tokens| naming.next(parent, tokens, &[]))
        };
        let plain = PrefixRoot::default();
        let adapter = PrefixRoot { adapter: NonZeroU32::new(1).map(AdapterId), ..plain };
        let different = [
            of(1, "a", plain, &[[1, 2], [3, 4]]),
            of(2, "a", plain, &[[1, 2], [3, 4]]),
            of(1, "b", plain, &[[1, 2], [3, 4]]),
            of(1, "a", PrefixRoot::from(1), &[[1, 2], [3, 4]]),
            of(1, "a", adapter, &[[1, 2], [3, 4]]),
            of(1, "a", plain, &[[1, 0], [3, 4]]),
            of(1, "a", plain, &[[3, 4]]),
            of(1, "a", plain, &[[1, 2]]),
            of(1, "a", plain, &[]),
        ];
        assert_eq!(different.iter().collect::<HashSet<_>>().len(), different.len());
        assert_eq!(of(1, "a", plain, &[[1, 2], [3, 4]]), different[0]);
        let bytes = different[0].to_bytes();
        assert_eq!(ContentName::from_bytes(bytes), Some(different[0]));
        assert_eq!(different[0].low().to_be_bytes(), bytes[8..]);
    }

    #[test]
    fn a_name_depends_on_images_and_not_on_their_numbers() {
        let naming = Naming::new(&[1; 32], "a");
        let of = |tokens: [u32; 3], images: &[(u8, i64)]| {
            let images: Vec<BlockImage> =
                images.iter().map(|(hash, offset)| BlockImage { hash: [*hash; 32], offset: *offset }).collect();
            naming.next(naming.root(PrefixRoot::default()), &tokens, &images)
        };
        let (two, later) = ([7, IMAGE_KEY | 1, IMAGE_KEY | 1], [IMAGE_KEY | 1, IMAGE_KEY | 1, 7]);
        let different = [
            of(two, &[]),
            of(two, &[(1, 1)]),
            of(two, &[(2, 1)]),
            of([6, two[1], two[2]], &[(1, 1)]),
            of(later, &[(1, 0)]),
            of(later, &[(1, -1)]),
            of([two[1]; 3], &[(1, 0)]),
            of([two[1]; 3], &[(1, 0), (2, 2)]),
            of([two[1]; 3], &[(1, 0), (2, 1)]),
        ];
        assert_eq!(different.iter().collect::<HashSet<_>>().len(), different.len());
        assert_eq!(of([7, IMAGE_KEY | 5, IMAGE_KEY | 5], &[(1, 1)]), different[1]);
    }
}
