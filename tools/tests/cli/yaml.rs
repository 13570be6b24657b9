//! YAML documents as JSON values, which have the same types.

use saphyr_parser::{Event, Parser, ScalarStyle};
use serde_json::{Map, Value};

/// The documents of `text`, which has no anchors.
pub fn documents(text: &str) -> Vec<Value> {
    let mut events = Parser::new_from_str(text).map(|event| event.unwrap().0);
    let mut documents = Vec::new();
    while let Some(event) = events.next() {
        if matches!(event, Event::DocumentStart(_)) {
            let first = events.next().unwrap();
            documents.push(value(first, &mut events));
        }
    }
    documents
}

/// The value that starts with `first`.
fn value<'a>(first: Event<'a>, events: &mut impl Iterator<Item = Event<'a>>) -> Value {
    match first {
        // A plain scalar that is not JSON is text.
        Event::Scalar(text, ScalarStyle::Plain, ..) => {
            serde_json::from_str(&text).unwrap_or_else(|_| Value::String(text.into_owned()))
        }
        Event::Scalar(text, ..) => Value::String(text.into_owned()),
        Event::SequenceStart(..) => {
            let mut values = Vec::new();
            loop {
                match events.next().unwrap() {
                    Event::SequenceEnd => return Value::Array(values),
                    event => values.push(value(event, events)),
                }
            }
        }
        Event::MappingStart(..) => {
            let mut map = Map::new();
            loop {
                match events.next().unwrap() {
                    Event::MappingEnd => return Value::Object(map),
                    Event::Scalar(key, ..) => {
                        let first = events.next().unwrap();
                        map.insert(key.into_owned(), value(first, events));
                    }
                    event => panic!("a key is {event:?}"),
                }
            }
        }
        event => panic!("{event:?} is no value"),
    }
}
