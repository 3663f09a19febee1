//! Enumerations that are texts on the wire and for people.

/// An enum of values with one text each, and the texts of older releases that are read as well. The last value stands
/// for all texts that this release does not know.
macro_rules! texts {
    ($(#[$of_enum:meta])* pub enum $name:ident {
        $($(#[$of_value:meta])* $value:ident = $text:literal $(| $older:literal)*,)*
    }) => {
        $(#[$of_enum])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, serde::Serialize, serde::Deserialize)]
        #[serde(from = "String", into = "&'static str")]
        pub enum $name { $($(#[$of_value])* $value,)* }

        impl $name {
            pub const ALL: &[$name] = &[$($name::$value,)*];

            /// On the wire, and for people.
            pub fn text(self) -> &'static str {
                match self { $($name::$value => $text,)* }
            }
        }

        impl From<$name> for &'static str {
            fn from(value: $name) -> &'static str {
                value.text()
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> $name {
                match text.as_str() {
                    $($text $(| $older)* => $name::$value,)*
                    _ => *$name::ALL.last().expect("there are values"),
                }
            }
        }

        // Newer releases may have more.
        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                utoipa::openapi::ObjectBuilder::new()
                    .schema_type(utoipa::openapi::Type::String)
                    .enum_values(Some($name::ALL.iter().map(|value| value.text())))
                    .into()
            }
        }

        impl utoipa::ToSchema for $name {}

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.text())
            }
        }
    };
}

pub(crate) use texts;
