//! The models and adapters that an API key may use.

use std::sync::Arc;

/// The models and adapters that the callers with an API key may use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Allowed {
    /// Names of models; `None` for all.
    pub models: Option<Arc<[String]>>,
    /// Names of LoRA adapters; `None` for all.
    pub adapters: Option<Arc<[String]>>,
}

impl Allowed {
    /// True for callers who may use the model with these names.
    pub fn model(&self, names: &[String]) -> bool {
        self.models.as_ref().is_none_or(|models| names.iter().any(|name| models.contains(name)))
    }

    /// True for callers who may use the adapter with this name.
    pub fn adapter(&self, name: &str) -> bool {
        self.adapters.as_ref().is_none_or(|adapters| adapters.iter().any(|own| own == name))
    }
}
