//! What comes with a request: names in its path, a query, a body.

use holdfast_api::{Code, Error};
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeOwned, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;
use std::marker::PhantomData;
use utoipa::openapi::path::{Parameter, ParameterIn};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{IntoParams, ToSchema};

/// A schema by its name, as the description keeps it.
pub type Named = (String, RefOr<Schema>);

/// What a path names, decoded.
#[derive(Default)]
pub struct Path(Vec<(String, String)>);

impl Path {
    pub fn new(parts: Vec<(String, String)>) -> Path {
        Path(parts)
    }

    /// Of a part that the path of the table has.
    pub fn text(&self, name: &str) -> String {
        let found = self.0.iter().find(|(key, _)| key == name);
        found.map(|(_, text)| text.clone()).unwrap_or_default()
    }

    /// # Errors
    /// It is no number from 0 to 2^32 - 1.
    pub fn number(&self, name: &str) -> Result<u32, Error> {
        let text = self.text(name);
        // `+1` and `01` are numbers to Rust, and to nobody who reads the description.
        let found = text.parse().ok().filter(|number: &u32| number.to_string() == text);
        found.ok_or_else(|| Error::new(Code::Invalid, format!("{name} `{text}` is no number from 0 to {}", u32::MAX)))
    }
}

/// What stands behind the question mark.
pub trait Query: Sized {
    fn parameters() -> Vec<Parameter>;

    /// # Errors
    /// There is something in it that nobody asks for, or that can't be read.
    fn read(text: &str) -> Result<Self, Error>;
}

/// Nothing is asked for.
pub struct Nothing;

fn read_query<T: DeserializeOwned>(text: &str) -> Result<T, Error> {
    serde_urlencoded::from_str(text).map_err(|why| Error::new(Code::Invalid, format!("the query can't be read: {why}")))
}

impl Query for Nothing {
    fn parameters() -> Vec<Parameter> {
        Vec::new()
    }

    fn read(text: &str) -> Result<Nothing, Error> {
        match text.is_empty() {
            true => Ok(Nothing),
            false => {
                Err(Error::new(Code::Invalid, format!("this takes no query, and there is `{text}`; leave it out")))
            }
        }
    }
}

/// Fields of a query.
pub struct Fields<T>(pub T);

impl<T: DeserializeOwned + IntoParams> Query for Fields<T> {
    fn parameters() -> Vec<Parameter> {
        T::into_params(|| Some(ParameterIn::Query))
    }

    fn read(text: &str) -> Result<Fields<T>, Error> {
        read_query(text).map(Fields)
    }
}

/// What a request carries.
pub trait Body: Sized {
    const IS_JSON: bool;

    fn schema(into: &mut Vec<Named>) -> Option<RefOr<Schema>>;

    /// # Errors
    /// It can't be read as what is asked for.
    fn read(bytes: &[u8]) -> Result<Self, Error>;
}

impl Body for Nothing {
    const IS_JSON: bool = false;

    fn schema(_: &mut Vec<Named>) -> Option<RefOr<Schema>> {
        None
    }

    /// What comes all the same is left alone, as RFC 9110 has it of methods without a meaning for a body.
    fn read(_: &[u8]) -> Result<Nothing, Error> {
        Ok(Nothing)
    }
}

/// An object.
pub struct Object<T>(pub T);

impl<T: DeserializeOwned + ToSchema> Body for Object<T> {
    const IS_JSON: bool = true;

    fn schema(into: &mut Vec<Named>) -> Option<RefOr<Schema>> {
        Some(reference::<T>(into))
    }

    fn read(bytes: &[u8]) -> Result<Object<T>, Error> {
        let read = serde_json::from_slice::<Only<T>>(bytes);
        read.map(|Only(body)| Object(body))
            .map_err(|why| Error::new(Code::Invalid, format!("the body can't be read: {why}")))
    }
}

/// What is written as an object: serde takes a list of the values of its fields as well.
pub struct Only<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Only<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Only<T>, D::Error> {
        deserializer.deserialize_map(OnlyVisitor(PhantomData))
    }
}

struct OnlyVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for OnlyVisitor<T> {
    type Value = Only<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Only<T>, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map)).map(Only)
    }
}

/// A reference to the schema of a type, which is kept with all that it refers to.
pub fn reference<T: ToSchema>(into: &mut Vec<Named>) -> RefOr<Schema> {
    into.push((T::name().into_owned(), T::schema()));
    T::schemas(into);
    RefOr::Ref(utoipa::openapi::Ref::from_schema_name(T::name()))
}
