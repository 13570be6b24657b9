//! Reads a JSON file as DeepSpeed does: with comments, and without a key that is there twice.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Parses `text`, an object.
///
/// # Errors
/// If it is not JSON, not an object, or has a key twice; with the line.
pub fn parse(text: &str) -> Result<Map<String, Value>, String> {
    let mut text = text.trim_start_matches('\u{feff}').to_string();
    json_strip_comments::strip(&mut text).map_err(|error| format!("not valid JSON: {error}"))?;
    match serde_json::from_str(&text) {
        Ok(Unique(Value::Object(object))) => Ok(object),
        Ok(_) => Err("expected an object, { … }".to_string()),
        Err(error) => Err(format!("not valid JSON: {error}")),
    }
}

/// A value without an object that has a key twice.
struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue).map(Self)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Unique(item)) = items.next_element()? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some((key, Unique(value))) = entries.next_entry::<String, _>()? {
            if object.insert(key.clone(), value).is_some() {
                return Err(A::Error::custom(format!("the key \"{key}\" is there twice")));
            }
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_are_passed_over_and_keys_that_are_there_twice_refused() {
        let text = "{ // batch\n  \"a\": 1e3, /* many */ \"b\": [true, null, \"x // y\"], # end\n}";
        let object = parse(text).unwrap();
        assert_eq!(object["a"], 1000.0);
        assert_eq!(object["b"], serde_json::json!([true, null, "x // y"]));
        let twice = parse("{\"a\": {\"b\": 1,\n \"b\": 2}}").unwrap_err();
        assert!(twice.contains("\"b\" is there twice") && twice.contains("line 2"), "{twice}");
        assert!(parse("[1]").unwrap_err().contains("an object"));
        assert!(parse("{\"a\": }").unwrap_err().contains("line 1"));
    }
}
