//! Formats by the names of modules, as `quantization_config` describes them.

use pegainfer_core::weights::grouped::{GroupFormat, Offset, ScaleDType, StoredFormat};
use regex::Regex;

/// Format of a module.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Scheme {
    Bf16,
    /// FP8 with a scale for each block of 128 x 128.
    Fp8,
    /// FP8 with a scale for each row.
    Fp8Rows(ScaleDType),
    /// Integers of 4 bits; `None`: a scale for each row.
    Int4(Option<usize>, ScaleDType, Offset),
    Nvfp4,
    Mxfp4,
    /// Any format in groups.
    Groups(GroupFormat),
}

impl Scheme {
    /// Format of rows of `k` columns.
    pub fn format(self, k: usize) -> StoredFormat {
        match self {
            Self::Bf16 => StoredFormat::Bf16,
            Self::Fp8 => StoredFormat::Fp8,
            Self::Fp8Rows(dtype) => StoredFormat::Grouped(GroupFormat::fp8(k, dtype)),
            Self::Int4(group, dtype, offset) => {
                StoredFormat::Grouped(GroupFormat::int(4, group.unwrap_or(k), dtype, offset))
            }
            Self::Nvfp4 => StoredFormat::Grouped(GroupFormat::NVFP4),
            Self::Mxfp4 => StoredFormat::Grouped(GroupFormat::MXFP4),
            Self::Groups(format) => StoredFormat::Grouped(format),
        }
    }
}

/// Modules that a rule is for.
#[derive(Debug, Clone)]
pub(super) enum Modules {
    /// A whole name, or its beginning or end at a dot.
    Named(String),
    /// Names that contain this text.
    Containing(String),
    /// Names that begin with a match.
    Matching(Regex),
    /// All.
    Every,
}

impl PartialEq for Modules {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Named(a), Self::Named(b)) | (Self::Containing(a), Self::Containing(b)) => a == b,
            (Self::Matching(a), Self::Matching(b)) => a.as_str() == b.as_str(),
            (a, b) => matches!((a, b), (Self::Every, Self::Every)),
        }
    }
}

impl Modules {
    /// Names that begin with a match of `pattern`, in Python's syntax. `None` for syntax that is not supported: a
    /// pattern only describes what tensors tell, so it is skipped.
    pub fn matching(pattern: &str) -> Option<Self> {
        match Regex::new(&format!("^(?:{pattern})")) {
            Ok(regex) => Some(Self::Matching(regex)),
            Err(error) => {
                log::debug!("quantization_config: the pattern {pattern} is skipped: {error}");
                None
            }
        }
    }

    /// Whole names that fit `pattern`, in which `*` stands for any text.
    pub fn wildcard(pattern: &str) -> Option<Self> {
        Self::matching(&format!("{}$", regex::escape(pattern).replace(r"\*", ".*")))
    }

    pub fn contain(&self, module: &str) -> bool {
        match self {
            Self::Named(name) => {
                let (front, back) = (module.strip_prefix(name.as_str()), module.strip_suffix(name.as_str()));
                front.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
                    || back.is_some_and(|rest| rest.ends_with('.'))
            }
            Self::Containing(text) => module.contains(text.as_str()),
            Self::Matching(regex) => regex.is_match(module),
            Self::Every => true,
        }
    }
}

/// Schemes of modules: the first rule that contains a module decides; others are bf16.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Rules(Vec<(Modules, Scheme)>);

impl Rules {
    /// FP8 in blocks, except modules with these names.
    pub fn fp8(never: &[&str]) -> Self {
        let mut rules = Self::never(never);
        rules.add_fp8();
        rules
    }

    /// All modules in groups of this format.
    pub fn groups(format: GroupFormat) -> Self {
        Self(vec![(Modules::Every, Scheme::Groups(format))])
    }

    /// Modules with these names stay bf16.
    pub fn never(names: &[&str]) -> Self {
        Self(names.iter().map(|name| (Modules::Named((*name).to_owned()), Scheme::Bf16)).collect())
    }

    /// Adds a rule after the others.
    pub fn add(&mut self, modules: Modules, scheme: Scheme) {
        self.0.push((modules, scheme));
    }

    /// All other modules are FP8 in blocks, except the output matrix.
    pub fn add_fp8(&mut self) {
        self.add(Modules::Named("lm_head".to_owned()), Scheme::Bf16);
        self.add(Modules::Every, Scheme::Fp8);
    }

    /// Scheme of the projection weight `name` (`X.weight`).
    pub fn scheme(&self, name: &str) -> Scheme {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        self.0.iter().find(|(modules, _)| modules.contain(module)).map_or(Scheme::Bf16, |(_, scheme)| *scheme)
    }

    /// True if a rule gives this scheme.
    pub fn any(&self, wanted: Scheme) -> bool {
        self.0.iter().any(|(_, scheme)| *scheme == wanted)
    }
}
