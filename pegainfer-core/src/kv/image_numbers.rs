//! Short numbers of images, for the keys of the prefix index.

use std::collections::{HashMap, VecDeque};

/// Images whose numbers are remembered: 3 MB.
const MAX_REMEMBERED: usize = 1 << 16;
/// Numbers must leave the highest bit free.
const END: u32 = 1 << 31;

/// Numbers of images by their hashes. A number is never used again, so that keys of one image never equal those of
/// another; an image that was forgotten gets a new number, and is only not found in the index.
#[derive(Debug, Default)]
pub(super) struct ImageNumbers {
    numbers: HashMap<[u8; 32], u32>,
    /// The same images, oldest first.
    order: VecDeque<[u8; 32]>,
    next: u32,
}

impl ImageNumbers {
    /// Number of an image that has one.
    pub fn get(&self, hash: &[u8; 32]) -> Option<u32> {
        self.numbers.get(hash).copied()
    }

    /// Number of an image, a new one if it has none; `None` once all numbers are used.
    pub fn number(&mut self, hash: &[u8; 32]) -> Option<u32> {
        if let Some(number) = self.get(hash) {
            return Some(number);
        }
        let number = Some(self.next).filter(|next| *next < END)?;
        if self.order.len() == MAX_REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.numbers.remove(&oldest);
        }
        self.next += 1;
        self.order.push_back(*hash);
        self.numbers.insert(*hash, number);
        Some(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_belongs_to_one_image_for_good() {
        let mut numbers = ImageNumbers::default();
        let hash = |i: u32| std::array::from_fn(|at| i.to_le_bytes().get(at).copied().unwrap_or(0));
        assert_eq!([numbers.number(&hash(1)), numbers.number(&hash(2)), numbers.number(&hash(1))], [0, 1, 0].map(Some));
        assert_eq!((numbers.get(&hash(2)), numbers.get(&hash(3))), (Some(1), None));
        let all = 2 + MAX_REMEMBERED as u32;
        for i in 3..=all {
            assert_eq!(numbers.number(&hash(i)), Some(i - 1));
        }
        assert_eq!((numbers.get(&hash(1)), numbers.numbers.len()), (None, MAX_REMEMBERED), "the oldest is forgotten");
        assert_eq!(numbers.number(&hash(1)), Some(all));
        numbers.next = END;
        assert_eq!((numbers.number(&hash(0)), numbers.number(&hash(1))), (None, Some(all)));
    }
}
