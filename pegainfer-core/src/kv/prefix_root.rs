//! What sequences must have in common, apart from tokens, to share cached prefixes.

use crate::adapter::AdapterId;

/// What two sequences must have in common, apart from tokens, to share cached prefixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct PrefixRoot {
    /// Salt of the request; 0 without.
    pub salt: u64,
    /// Adapter that computes keys and values; `None` for the model itself.
    pub adapter: Option<AdapterId>,
}

impl From<u64> for PrefixRoot {
    /// The model itself with this salt.
    fn from(salt: u64) -> Self {
        Self { salt, adapter: None }
    }
}
