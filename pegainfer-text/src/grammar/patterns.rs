//! Rewrites patterns of keys (`patternProperties`) for llguidance.
//!
//! llguidance removes the names in `properties` from the keys of each pattern, and all names and patterns from the keys
//! of `additionalProperties`. If nothing is left, it still allows a comma, after which no key can follow. Therefore a
//! pattern that matches only a few names becomes these names, and a pattern that matches every key leaves no additional
//! ones. Neither changes the meaning.

use super::error::GrammarError;
use llguidance::regex_to_lark;
use regex_syntax::hir::{Class, Hir, HirKind, Look, Repetition};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// Maximum number of names from one pattern that are not in `properties` already.
const MAX_NEW_NAMES: usize = 16;
/// Maximum work to list the names of a pattern, in bytes: 1,000 names of three digits take 40,000.
const MAX_WORK: usize = 64 << 10;
/// Work per text in addition to its bytes.
const TEXT_WORK: usize = 16;
/// Maximum number of patterns in a schema, and of bytes in an examined pattern.
const MAX_PATTERNS: usize = 500;
const MAX_PATTERN: usize = 512;
/// Maximum number of bytes that one schema may grow by.
const MAX_GROWTH: usize = 512 << 10;

/// Rewrites all objects of a schema.
pub(super) fn rewrite(schema: &mut Value) {
    // The place of a schema is its name in a reference.
    if count(schema) <= MAX_PATTERNS && !refers_to_pattern(schema) {
        let mut left = MAX_GROWTH;
        for_each_object(schema, &mut |object| rewrite_object(object, &mut left));
    }
}

/// Refuses objects that [`rewrite`] has not handled, or that would grow too much.
///
/// # Errors
/// One clause that names the pattern.
pub(super) fn check(schema: &Value) -> Result<(), GrammarError> {
    let patterns = count(schema);
    if patterns > MAX_PATTERNS {
        let message = format!("its schema has {patterns} patterns of keys, at most {MAX_PATTERNS} are compiled");
        return Err(GrammarError::Limit(message));
    }
    let mut found = None;
    let mut look = |object: &Map<String, Value>| {
        let Some(patterns) = object.get("patternProperties").and_then(Value::as_object) else { return };
        let mut shadowed =
            patterns.keys().filter(|pattern| names(pattern).is_some_and(|names| is_named(object, &names)));
        found = found.take().or_else(|| shadowed.next().cloned());
    };
    visit(schema, &mut look);
    let Some(pattern) = found else { return Ok(()) };
    let shown: String = pattern.chars().take(80).collect();
    Err(GrammarError::Invalid(format!(
        "its patternProperties {shown:?} matches keys of properties only: put its schema into these properties"
    )))
}

fn rewrite_object(object: &mut Map<String, Value>, left: &mut usize) {
    let Some(Value::Object(patterns)) = object.get("patternProperties") else { return };
    // A limit on the number of keys cannot be enforced together with optional names.
    let is_counted = object.contains_key("minProperties") || object.contains_key("maxProperties");
    let mut replaced = Vec::new();
    for (pattern, schema) in patterns {
        let names = names(pattern);
        let is_used =
            |names: &BTreeSet<String>| (names.len() <= MAX_NEW_NAMES && !is_counted) || is_named(object, names);
        let Some(names) = names.filter(is_used) else { continue };
        let growth = schema.to_string().len().saturating_mul(names.len());
        if let Some(rest) = left.checked_sub(growth) {
            *left = rest;
            replaced.push((pattern.clone(), schema.clone(), names));
        }
    }
    for (pattern, schema, names) in replaced {
        replace(object, &pattern, &schema, &names);
    }
    let matches_all = |pattern: &String| parse(pattern).is_some_and(|pattern| matches_every_text(&pattern));
    let patterns = object.get("patternProperties").and_then(Value::as_object);
    if patterns.is_some_and(|patterns| patterns.keys().any(matches_all)) {
        object.insert("additionalProperties".into(), Value::Bool(false));
    }
}

/// Adds the schema of a pattern to the properties of all names that it matches.
fn replace(object: &mut Map<String, Value>, pattern: &str, schema: &Value, names: &BTreeSet<String>) {
    if let Some(Value::Object(patterns)) = object.get_mut("patternProperties") {
        patterns.shift_remove(pattern);
        if patterns.is_empty() {
            object.shift_remove("patternProperties");
        }
    }
    let properties = object.entry("properties").or_insert_with(|| Value::Object(Map::new()));
    let Value::Object(properties) = properties else { return };
    for name in names {
        let both = match properties.get(name) {
            Some(own) => json!({"allOf": [own, schema]}),
            None => schema.clone(),
        };
        properties.insert(name.clone(), both);
    }
}

/// True if all names are in `properties`, so that the pattern matches no other key.
fn is_named(object: &Map<String, Value>, names: &BTreeSet<String>) -> bool {
    let properties = object.get("properties").and_then(Value::as_object);
    names.iter().all(|name| properties.is_some_and(|properties| properties.contains_key(name)))
}

/// Number of patterns in a schema.
fn count(schema: &Value) -> usize {
    let mut count = 0;
    visit(schema, &mut |object| {
        count += object.get("patternProperties").and_then(Value::as_object).map_or(0, Map::len);
    });
    count
}

/// The names that a pattern matches, if they are few.
fn names(pattern: &str) -> Option<BTreeSet<String>> {
    let hir = parse(pattern)?;
    if matches_nothing(&hir) {
        return Some(BTreeSet::new());
    }
    let properties = hir.properties();
    // A pattern without anchors also matches inside longer names.
    let (prefix, suffix) = (properties.look_set_prefix(), properties.look_set_suffix());
    let is_anchored = prefix.contains(Look::Start) && suffix.contains(Look::End);
    is_anchored.then(|| Expansion { left: MAX_WORK }.texts(&hir, Place { starts: true, ends: true })).flatten()
}

fn parse(pattern: &str) -> Option<Hir> {
    if pattern.len() > MAX_PATTERN {
        return None;
    }
    regex_syntax::parse(&regex_to_lark(pattern, "dw")).ok()
}

/// True if every match of the pattern needs a character of an empty class.
fn matches_nothing(pattern: &Hir) -> bool {
    match pattern.kind() {
        HirKind::Class(class) => class.is_empty(),
        HirKind::Capture(capture) => matches_nothing(&capture.sub),
        HirKind::Repetition(repetition) => repetition.min > 0 && matches_nothing(&repetition.sub),
        HirKind::Concat(parts) => parts.iter().any(matches_nothing),
        HirKind::Alternation(parts) => parts.iter().all(matches_nothing),
        HirKind::Empty | HirKind::Literal(_) | HirKind::Look(_) => false,
    }
}

/// True if the pattern matches the empty text without looking around, and so somewhere in every text.
fn matches_every_text(pattern: &Hir) -> bool {
    pattern.properties().look_set().is_empty() && pattern.properties().minimum_len() == Some(0)
}

/// Place of a sub-pattern: at the start or the end, where anchors always hold.
#[derive(Clone, Copy)]
struct Place {
    starts: bool,
    ends: bool,
}

/// Lists the texts that a pattern matches, within a limit on work.
struct Expansion {
    left: usize,
}

impl Expansion {
    /// All texts that a sub-pattern matches; `None` if there are too many or they are unknown.
    fn texts(&mut self, hir: &Hir, place: Place) -> Option<BTreeSet<String>> {
        let nothing = || Some(BTreeSet::from([String::new()]));
        match hir.kind() {
            HirKind::Empty => nothing(),
            HirKind::Look(Look::Start) if place.starts => nothing(),
            HirKind::Look(Look::End) if place.ends => nothing(),
            HirKind::Look(_) | HirKind::Class(Class::Bytes(_)) => None,
            HirKind::Literal(literal) => Some(BTreeSet::from([std::str::from_utf8(&literal.0).ok()?.to_owned()])),
            HirKind::Class(Class::Unicode(class)) => {
                self.set(class.iter().flat_map(|range| range.start()..=range.end()).map(String::from))
            }
            HirKind::Capture(capture) => self.texts(&capture.sub, place),
            HirKind::Repetition(repetition) => self.repeated(repetition),
            HirKind::Concat(parts) => {
                let (mut all, last) = (BTreeSet::from([String::new()]), parts.len() - 1);
                for (i, part) in parts.iter().enumerate() {
                    let place = Place { starts: place.starts && i == 0, ends: place.ends && i == last };
                    let part = self.texts(part, place)?;
                    all = self.joined(all, &part)?;
                }
                Some(all)
            }
            HirKind::Alternation(parts) => {
                let all = parts.iter().map(|part| self.texts(part, place)).collect::<Option<Vec<_>>>()?;
                self.set(all.into_iter().flatten())
            }
        }
    }

    fn repeated(&mut self, repetition: &Repetition) -> Option<BTreeSet<String>> {
        let max = repetition.max?;
        let once = self.texts(&repetition.sub, Place { starts: false, ends: false })?;
        let (mut all, mut power) = (BTreeSet::new(), BTreeSet::from([String::new()]));
        for count in 0..=max {
            if count >= repetition.min {
                all.append(&mut self.set(power.iter().cloned())?);
            }
            if count < max {
                power = self.joined(power, &once)?;
            }
        }
        Some(all)
    }

    /// Each text of one set followed by each of the other.
    fn joined(&mut self, first: BTreeSet<String>, second: &BTreeSet<String>) -> Option<BTreeSet<String>> {
        // An anchor adds no text.
        if second.len() == 1 && second.contains("") {
            return Some(first);
        }
        self.set(first.iter().flat_map(|first| second.iter().map(move |second| format!("{first}{second}"))))
    }

    fn set(&mut self, texts: impl Iterator<Item = String>) -> Option<BTreeSet<String>> {
        let mut set = BTreeSet::new();
        for text in texts {
            self.left = self.left.checked_sub(text.len() + TEXT_WORK)?;
            set.insert(text);
        }
        Some(set)
    }
}

/// Keywords with values that are not schemas.
const DATA: [&str; 6] = ["enum", "const", "default", "examples", "required", "x-guidance"];
/// Keywords with values that are maps from names to schemas.
const MAPS: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];

fn for_each_object(schema: &mut Value, change: &mut impl FnMut(&mut Map<String, Value>)) {
    match schema {
        Value::Array(list) => list.iter_mut().for_each(|schema| for_each_object(schema, change)),
        Value::Object(object) => {
            for (keyword, value) in object.iter_mut().filter(|(keyword, _)| !DATA.contains(&keyword.as_str())) {
                match value {
                    Value::Object(map) if MAPS.contains(&keyword.as_str()) => {
                        map.values_mut().for_each(|schema| for_each_object(schema, change));
                    }
                    value => for_each_object(value, change),
                }
            }
            change(object);
        }
        _ => {}
    }
}

fn visit(schema: &Value, look: &mut impl FnMut(&Map<String, Value>)) {
    match schema {
        Value::Array(list) => list.iter().for_each(|schema| visit(schema, look)),
        Value::Object(object) => {
            for (keyword, value) in object.iter().filter(|(keyword, _)| !DATA.contains(&keyword.as_str())) {
                match value {
                    Value::Object(map) if MAPS.contains(&keyword.as_str()) => {
                        map.values().for_each(|schema| visit(schema, look));
                    }
                    value => visit(value, look),
                }
            }
            look(object);
        }
        _ => {}
    }
}

/// True if a reference leads into `patternProperties`.
fn refers_to_pattern(schema: &Value) -> bool {
    let mut refers = false;
    visit(schema, &mut |object| {
        let reference = object.get("$ref").and_then(Value::as_str);
        refers |= reference.is_some_and(|reference| reference.contains("/patternProperties/"));
    });
    refers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_a_pattern_are_found_if_they_are_few() {
        for (pattern, expected) in [
            ("^a$", Some("a")),
            ("^(a|bc)$", Some("a bc")),
            ("^a$|^b$", Some("a b")),
            // A part of it matches nothing, so the texts are unknown.
            ("^(?:a|[^\\s\\S])$", None),
            ("^x[0-2]?$", Some("x x0 x1 x2")),
            ("^(?:ab){1,2}$", Some("ab abab")),
            ("^\\$ref$", Some("$ref")),
            ("^é$", Some("é")),
            ("a", None),
            ("^a", None),
            ("a$", None),
            ("^a|b$", None),
            ("^a+$", None),
            ("^.*$", None),
            ("^\\w{9}$", None),
            ("^(a{99}){999}$", None),
            ("^a\\b$", None),
            ("(", None),
            ("^((a{9}){9}){99}$", None),
            ("^\\pL$", None),
        ] {
            let names = names(pattern).map(|names| names.into_iter().collect::<Vec<_>>().join(" "));
            assert_eq!(names.as_deref(), expected, "{pattern}");
        }
        assert_eq!(names("^\\d{3}$").unwrap().len(), 1000);
        assert!(names("^$").unwrap().contains(""));
        assert!(names("^[^\\s\\S]$").unwrap().is_empty(), "it matches nothing");
    }

    #[test]
    fn patterns_of_few_names_become_these_names() {
        let one = json!({"enum": [1, 2]});
        let two = json!({"enum": [2, 3]});
        let object = |fields: Value| {
            let mut schema = json!({"type": "object"});
            schema.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            schema
        };
        let both = json!({"allOf": [one, two]});
        for (before, after) in [
            (json!({"properties": {"a": one}, "patternProperties": {"^a$": two}}), json!({"properties": {"a": both}})),
            (
                json!({"patternProperties": {"^[ab]$": two, "^x": one}}),
                json!({"patternProperties": {"^x": one}, "properties": {"a": two, "b": two}}),
            ),
            // Not necessary, and too many.
            (json!({"patternProperties": {"^\\d{3}$": two}}), json!({"patternProperties": {"^\\d{3}$": two}})),
            // With a limit on the number of keys, only objects without other keys.
            (
                json!({"minProperties": 1, "patternProperties": {"^b$": two}}),
                json!({"minProperties": 1, "patternProperties": {"^b$": two}}),
            ),
            (
                json!({"patternProperties": {"": false}}),
                json!({"patternProperties": {"": false}, "additionalProperties": false}),
            ),
        ] {
            for wrap in [|schema: Value| schema, |schema: Value| json!({"$defs": {"enum": {"allOf": [schema]}}})] {
                let mut schema = wrap(object(before.clone()));
                rewrite(&mut schema);
                assert_eq!(schema, wrap(object(after.clone())), "{before}");
                check(&schema).unwrap();
            }
        }
        // Values that are not schemas are not changed.
        for data in
            [json!({"const": {"patternProperties": {"^a$": {}}}}), json!({"enum": [{"patternProperties": {"^$": 1}}]})]
        {
            let mut same = data.clone();
            rewrite(&mut same);
            assert_eq!(same, data);
        }
    }

    #[test]
    fn the_work_on_hostile_patterns_is_bounded() {
        let long = "\\pL".repeat(1 << 20);
        for pattern in ["^[a-z]{3}x{4000}$", "^(x?){4000}$", "^((|x){99}){99}$", "^(a{99}|b){99}$", "^\\pL{9}$", &long]
        {
            assert!(names(pattern).is_none());
        }
        let patterns = |count: usize| {
            let patterns: Map<String, Value> = (0..count).map(|i| (format!("^{i}$"), json!(false))).collect();
            json!({"type": "object", "properties": {"0": {}}, "patternProperties": patterns})
        };
        let (mut maximum, mut beyond) = (patterns(MAX_PATTERNS), patterns(MAX_PATTERNS + 1));
        let unchanged = beyond.clone();
        [&mut maximum, &mut beyond].into_iter().for_each(rewrite);
        assert!(check(&maximum).is_ok() && maximum["patternProperties"].is_null());
        assert_eq!(beyond, unchanged);
        assert!(matches!(check(&beyond), Err(GrammarError::Limit(_))));
    }

    #[test]
    fn a_schema_that_would_grow_too_much_is_refused() {
        let large = json!({"description": "x".repeat(MAX_GROWTH)});
        let mut schema = json!({"properties": {"a": {}}, "patternProperties": {"^a$": large}});
        let before = schema.clone();
        rewrite(&mut schema);
        assert_eq!(schema, before);
        let error = check(&schema).unwrap_err().to_string();
        assert!(error.contains("its patternProperties \"^a$\" matches keys of properties only"), "{error}");
    }
}
