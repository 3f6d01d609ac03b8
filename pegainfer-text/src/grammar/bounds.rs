//! Limits that are checked on a grammar's source, before llguidance sees it.
//!
//! llguidance counts fuel between the steps of its regular expression library. One step takes exponential time when it
//! checks whether the patterns of a JSON string exclude each other: the symbolic derivative of an intersection has as
//! many parts as its members' parts multiplied. `allOf` multiplies the alternatives of its members in the same way.
//! Both numbers are estimated and bounded here. Intersections in Lark (`&`) take another path, which fuel ends.

use super::error::GrammarError;
use super::patterns;
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};

/// Maximum of the multiplied sizes of patterns that match the same text, and of the alternatives that `allOf`
/// combines.
const MAX_COMBINATIONS: u64 = 1 << 20;
/// Maximum nesting of a schema, including `$ref`.
const MAX_DEPTH: usize = 512;
/// Maximum number of optional properties of one object.
const MAX_OPTIONAL_PROPERTIES: usize = 1000;
/// Maximum number of properties in a schema.
const MAX_PROPERTIES: usize = 5000;
/// Size of a `format`'s pattern and of a length limit, as factors.
const FORMAT: u64 = 32;
const LENGTH_LIMIT: u64 = 4;

/// Checks the schemas in a Lark grammar: everything after a `%json`, even in a comment or a text.
///
/// # Errors
/// One clause that names the limit.
pub(super) fn check(lark: &str) -> Result<(), GrammarError> {
    for (at, keyword) in lark.match_indices("%json") {
        let mut schemas = serde_json::Deserializer::from_str(&lark[at + keyword.len()..]).into_iter::<Value>();
        // Text that is not JSON is refused by llguidance, if it is a schema at all.
        if let Some(Ok(schema)) = schemas.next() {
            check_schema(&schema)?;
        }
    }
    Ok(())
}

fn check_schema(root: &Value) -> Result<(), GrammarError> {
    patterns::check(root)?;
    Estimate { root, known: HashMap::new(), open: HashSet::new(), depth: 0, properties: 0 }.schema(root).map(drop)
}

/// Number of cases of a schema. `allOf` multiplies both numbers of its members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cases {
    /// Alternatives of the value itself.
    alternatives: u64,
    /// Multiplied pattern sizes, or number of alternatives, at the worst place in the value.
    inside: u64,
}

impl Cases {
    const ONE: Self = Self { alternatives: 1, inside: 1 };

    /// Cases of a value that matches both schemas.
    fn and(self, other: Self) -> Self {
        let alternatives = self.alternatives.saturating_mul(other.alternatives);
        Self { alternatives, inside: self.inside.saturating_mul(other.inside) }
    }

    /// Cases of a value that matches one of both schemas.
    fn or(self, other: Self) -> Self {
        let alternatives = self.alternatives.saturating_add(other.alternatives);
        Self { alternatives, inside: self.inside.max(other.inside) }
    }

    /// The larger number, which counts for a value that contains this one.
    fn worst(self) -> u64 {
        self.alternatives.max(self.inside)
    }
}

struct Estimate<'a> {
    root: &'a Value,
    known: HashMap<&'a str, Cases>,
    /// References that are being followed. A recursive schema meets them again.
    open: HashSet<&'a str>,
    depth: usize,
    properties: usize,
}

impl<'a> Estimate<'a> {
    fn schema(&mut self, schema: &'a Value) -> Result<Cases, GrammarError> {
        let Some(map) = schema.as_object() else { return Ok(Cases::ONE) };
        if self.depth == MAX_DEPTH {
            return limit(format!("its schema is nested more than {MAX_DEPTH} levels deep"));
        }
        self.depth += 1;
        let mut cases = Cases { alternatives: 1, inside: text(map).max(self.children(map)?) };
        for member in list(map, "allOf") {
            cases = cases.and(self.schema(member)?);
        }
        for name in ["anyOf", "oneOf"] {
            let mut either: Option<Cases> = None;
            for member in list(map, name) {
                let member = self.schema(member)?;
                either = Some(either.map_or(member, |either| either.or(member)));
            }
            cases = cases.and(either.unwrap_or(Cases::ONE));
        }
        let values = list(map, "enum").len().max(1) as u64;
        cases = cases.and(Cases { alternatives: values, inside: 1 });
        if let Some(reference) = map.get("$ref").and_then(Value::as_str) {
            cases = cases.and(self.reference(reference)?);
        }
        self.depth -= 1;
        if cases.worst() > MAX_COMBINATIONS {
            return limit(format!(
                "its patterns, or the alternatives that allOf combines, make more than {MAX_COMBINATIONS} combinations: use \
                 fewer or shorter patterns for one value"
            ));
        }
        Ok(cases)
    }

    fn reference(&mut self, reference: &'a str) -> Result<Cases, GrammarError> {
        if let Some(cases) = self.known.get(reference) {
            return Ok(*cases);
        }
        let Some(target) = resolve(self.root, reference) else {
            let shown: String = reference.chars().take(80).collect();
            let message = format!("its $ref {shown:?} does not lead to a part of it, as \"#/$defs/name\" would");
            return Err(GrammarError::Invalid(message));
        };
        if !self.open.insert(reference) {
            return Ok(Cases::ONE);
        }
        let cases = self.schema(target)?;
        self.open.remove(reference);
        self.known.insert(reference, cases);
        Ok(cases)
    }

    /// Maximum number of cases of the values inside an object or array. A property may also match a pattern of
    /// `patternProperties`; these exclude each other.
    fn children(&mut self, map: &'a Map<String, Value>) -> Result<u64, GrammarError> {
        let properties = object(map, "properties");
        self.properties += properties.len();
        if self.properties > MAX_PROPERTIES {
            return limit(format!("its schema has more than {MAX_PROPERTIES} properties"));
        }
        // `required` may contain names that are not properties, or repeat a name.
        let required =
            list(map, "required").iter().filter_map(Value::as_str).filter(|name| properties.contains_key(*name));
        let optional = properties.len() - required.collect::<HashSet<_>>().len();
        if optional > MAX_OPTIONAL_PROPERTIES {
            return limit(format!(
                "one of its objects has {optional} optional properties, at most {MAX_OPTIONAL_PROPERTIES} are compiled"
            ));
        }
        let mut named = 1;
        for value in object(map, "properties").values().chain(list(map, "prefixItems")) {
            named = self.schema(value)?.worst().max(named);
        }
        for name in ["additionalProperties", "items", "additionalItems"] {
            if let Some(value) = map.get(name) {
                named = self.schema(value)?.worst().max(named);
            }
        }
        let (mut matched, mut keys) = (1, Vec::new());
        for (pattern, value) in object(map, "patternProperties") {
            keys.push(pattern.len() as u64);
            matched = self.schema(value)?.worst().max(matched);
        }
        // Any two patterns of keys are intersected to check that they exclude each other.
        keys.sort_unstable();
        let keys = keys.iter().rev().take(2).product::<u64>().max(1);
        Ok(named.saturating_mul(matched).max(keys))
    }
}

/// The part of a schema that llguidance takes a reference for. It knows no escapes and no identifiers.
fn resolve<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    if reference == "#" || reference == "#/" {
        return Some(root);
    }
    reference.strip_prefix("#/")?.split('/').try_fold(root, |part, segment| match part {
        Value::Array(list) => list.get(segment.parse::<usize>().ok()?),
        part => part.get(segment),
    })
}

/// Multiplied sizes of the patterns that a text has to match.
fn text(map: &Map<String, Value>) -> u64 {
    let pattern = map.get("pattern").and_then(Value::as_str).map_or(1, |pattern| pattern.len().max(1) as u64);
    let format = if map.contains_key("format") { FORMAT } else { 1 };
    let limited = map.contains_key("minLength") || map.contains_key("maxLength");
    pattern * format * if limited { LENGTH_LIMIT } else { 1 }
}

fn limit<T>(message: String) -> Result<T, GrammarError> {
    Err(GrammarError::Limit(message))
}

fn list<'a>(map: &'a Map<String, Value>, name: &str) -> &'a [Value] {
    map.get(name).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn object<'a>(map: &'a Map<String, Value>, name: &str) -> &'a Map<String, Value> {
    static EMPTY: std::sync::LazyLock<Map<String, Value>> = std::sync::LazyLock::new(Map::new);
    map.get(name).and_then(Value::as_object).unwrap_or(&EMPTY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_names_of_properties_are_required() {
        let properties = |n: usize| (0..n).map(|i| (format!("p{i}"), json!({}))).collect::<Map<_, _>>();
        let check =
            |required: Vec<String>| check_schema(&json!({"properties": properties(1200), "required": required}));
        let names = |n: usize| (0..n).map(|i| format!("p{i}")).collect::<Vec<_>>();
        assert_eq!(check(names(200)), Ok(()));
        for required in [names(199), vec!["p0".into(); 4000], (0..4000).map(|i| format!("x{i}")).collect()] {
            let error = check(required).unwrap_err().to_string();
            assert!(error.contains("optional properties, at most 1000 are compiled"), "{error}");
        }
    }
}
