//! Scaled images of recent requests: an agent sends all images of its conversation again with each turn.

use crate::tenant::Tenant;
use pegainfer_core::images::Image;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// What a picture is made of: the BLAKE3 of its file, and its width and height after scaling. Tenants do not share
/// pictures: the time of an answer would tell one what another has sent.
pub type Key = (Tenant, [u8; 32], (u32, u32));

/// The most recent pictures of all tenants, within a number of bytes.
#[derive(Debug)]
pub struct RecentPictures {
    max_bytes: usize,
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    /// Each with the time of its last use, in uses.
    pictures: HashMap<Key, (Arc<Image>, u64)>,
    bytes: usize,
    uses: u64,
}

impl RecentPictures {
    /// None yet, of at most so many bytes.
    pub fn new(max_bytes: usize) -> Self {
        Self { max_bytes, entries: Mutex::default() }
    }

    /// A picture of an earlier request.
    pub fn get(&self, key: &Key) -> Option<Arc<Image>> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.uses += 1;
        let now = entries.uses;
        let (image, used) = entries.pictures.get_mut(key)?;
        *used = now;
        Some(image.clone())
    }

    /// Adds a picture. The least recently used ones make place for it.
    pub fn insert(&self, key: Key, image: Arc<Image>) {
        let bytes = image.pixels().len();
        if bytes > self.max_bytes {
            return;
        }
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.remove(&key);
        while entries.bytes + bytes > self.max_bytes {
            let oldest = entries.pictures.iter().min_by_key(|(_, (_, used))| *used).map(|(key, _)| *key);
            let Some(oldest) = oldest else { break };
            entries.remove(&oldest);
        }
        entries.uses += 1;
        entries.bytes += bytes;
        let now = entries.uses;
        entries.pictures.insert(key, (image, now));
    }
}

impl Entries {
    fn remove(&mut self, key: &Key) {
        if let Some((image, _)) = self.pictures.remove(key) {
            self.bytes -= image.pixels().len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_recent_pictures_of_each_tenant_are_kept() {
        let image = |colour: u8| Arc::new(Image::new((2, 2), vec![colour; 32 * 32 * 3]).unwrap());
        let key = |tenant: Tenant, file: u8| (tenant, [file; 32], (32, 32));
        let (one, other) = (Tenant::default(), Tenant { id: 1, has_key: true });
        let recent = RecentPictures::new(3 * 32 * 32 * 3);
        (1..=3).for_each(|i| recent.insert(key(one, i), image(i)));
        assert!(recent.get(&key(one, 1)).is_some_and(|found| found == image(1)));
        assert!(recent.get(&key(other, 1)).is_none(), "another tenant's");
        assert!(recent.get(&(one, [1; 32], (64, 32))).is_none(), "of another size");
        recent.insert(key(other, 4), image(4));
        let kept = [(one, 1), (one, 2), (one, 3), (other, 4)].map(|(tenant, i)| recent.get(&key(tenant, i)).is_some());
        assert_eq!(kept, [true, false, true, true], "the least recently used one is dropped");
        recent.insert(key(one, 5), Arc::new(Image::new((2, 8), vec![0; 32 * 128 * 3]).unwrap()));
        assert!(recent.get(&key(one, 5)).is_none() && recent.get(&key(one, 1)).is_some(), "larger than all");
    }
}
