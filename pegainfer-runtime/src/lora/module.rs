//! The matrices of a model that adapters may change.

use crate::projection_source::LayerSources;
use std::collections::BTreeMap;

/// Part of the paths of a text model's layers in a checkpoint that also has other towers. Adapters that were trained on
/// the text model alone lack it.
const TEXT_TOWER: &str = "language_model.";

/// Rows and columns of the matrices that adapters may change, by the path of their modules in the checkpoint.
#[derive(Debug)]
pub(super) struct ModelModules(BTreeMap<String, [usize; 2]>);

impl ModelModules {
    /// Those of layers as the whole model has them.
    pub fn of(layers: &[LayerSources]) -> Self {
        let sources = layers.iter().flat_map(LayerSources::all).flatten();
        let parts = sources.flat_map(|source| source.parts.iter().map(|part| (part, source.columns.stored)));
        let named = parts.filter(|(part, _)| !part.is_zeros());
        Self(named.map(|(part, columns)| (path(&part.name).to_owned(), [part.rows, columns])).collect())
    }

    /// Path in the checkpoint, rows and columns of the module that an adapter calls `path`.
    pub fn find(&self, path: &str) -> Option<(&str, [usize; 2])> {
        let nested = path.strip_prefix("model.").map(|rest| format!("model.{TEXT_TOWER}{rest}"));
        let found = self.0.get_key_value(path).or_else(|| self.0.get_key_value(nested?.as_str()));
        found.map(|(path, shape)| (path.as_str(), *shape))
    }

    /// Paths of all modules, as an adapter that has or lacks the part of the text tower calls them.
    pub fn names(&self, nested: bool) -> impl Iterator<Item = (&str, String)> {
        let own = move |path: &str| if nested { path.to_owned() } else { path.replacen(TEXT_TOWER, "", 1) };
        self.0.keys().map(move |path| (path.as_str(), own(path)))
    }
}

/// Path of the module of a weight.
pub(super) fn path(weight: &str) -> &str {
    weight.strip_suffix(".weight").unwrap_or(weight)
}

/// True if an adapter's path has the part of the text tower.
pub(super) fn is_nested(path: &str) -> bool {
    path.contains(TEXT_TOWER)
}
