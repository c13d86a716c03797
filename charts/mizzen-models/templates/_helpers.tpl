{{/* Merge the map `over` into the map `base`, in place. Unlike the function mergeOverwrite, values such as false, 0 and ""
overwrite, too; null removes the key. */}}
{{- define "mizzen-models.merge" -}}
{{- range $key, $value := .over -}}
{{- $old := get $.base $key -}}
{{- if and (kindIs "map" $value) (kindIs "map" $old) -}}
{{- include "mizzen-models.merge" (dict "base" $old "over" $value) -}}
{{- else if kindIs "invalid" $value -}}
{{- $_ := unset $.base $key -}}
{{- else -}}
{{- $_ := set $.base $key $value -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Names of the entries that have a source, in order. */}}
{{- define "mizzen-models.names" -}}
{{- $names := list -}}
{{- range $name, $entry := .Values.catalog -}}
{{- if dig "spec" "model" "source" "" $entry -}}{{- $names = append $names $name -}}{{- end -}}
{{- end -}}
{{- sortAlpha $names | join ", " -}}
{{- end }}

{{/* Fail if an entry has no source: then its name is probably misspelt. */}}
{{- define "mizzen-models.check" -}}
{{- range $name, $entry := .Values.catalog -}}
{{- if not (dig "spec" "model" "source" "" $entry) -}}
{{- fail (printf "catalog.%s: the catalog has no entry of this name. Correct the name, or set catalog.%s.spec.model.source if it is an entry of your own. The catalog has the entries %s" $name $name (include "mizzen-models.names" $)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Fields of spec for a kind of GPU; takes root, name and entry. */}}
{{- define "mizzen-models.accelerator" -}}
{{- with .entry.accelerator -}}
{{- $gpu := get $.root.Values.accelerators . -}}
{{- if not (kindIs "map" $gpu) -}}
{{- fail (printf "catalog.%s.accelerator: %s is not a key of accelerators, which has %s" $.name . (keys $.root.Values.accelerators | sortAlpha | join ", ")) -}}
{{- end -}}
{{- $pod := pick $gpu "tolerations" "runtimeClassName" -}}
{{- dict "accelerator" (omit $gpu "tolerations" "runtimeClassName") "podTemplate" $pod | toYaml -}}
{{- end -}}
{{- end }}

{{/* The spec of a service; takes root, name and entry. In this order, later values overwrite earlier ones: defaults, the
kind of GPU, the entry. The rest depends on these: cache, credentials and resources. */}}
{{- define "mizzen-models.spec" -}}
{{- $spec := deepCopy .root.Values.defaults -}}
{{- include "mizzen-models.merge" (dict "base" $spec "over" (include "mizzen-models.accelerator" . | fromYaml)) -}}
{{- include "mizzen-models.merge" (dict "base" $spec "over" (deepCopy .entry.spec)) -}}
{{- $model := $spec.model -}}
{{- if regexMatch "^(hf|s3|oci)://" $model.source -}}
{{- $cache := $model.cache | default dict -}}
{{- if and (eq ($cache.mode | default "") "PersistentVolumeClaim") (not $cache.claimName) -}}
{{- $_ := set $cache "claimName" (printf "%s-weights" .name) -}}
{{- if not $cache.size -}}
{{- $_ := set $cache "size" (required (printf "catalog.%s.disk: set the size of the claim for the weights, or set catalog.%s.spec.model.cache.claimName to an existing claim" .name .name) .entry.disk) -}}
{{- end -}}
{{- end -}}
{{- if and .entry.token (hasPrefix "hf://" $model.source) (not $model.credentialsSecretRef) -}}
{{- $_ := set $model "credentialsSecretRef" (pick .root.Values.hubToken "name" "key") -}}
{{- end -}}
{{- else -}}
{{- $_ := set $spec "model" (omit $model "cache" "credentialsSecretRef" "endpoint") -}}
{{- end -}}
{{- $pod := $spec.podTemplate | default dict -}}
{{- if and (not (hasKey $pod "resources")) (ne (dig "engine" "device" "" $spec) "CPU") -}}
{{- $gpus := dig "accelerator" "perPod" (dig "parallelism" "tensor" 1 $spec) $spec | int -}}
{{- $requests := dict "cpu" (add1 $gpus | toString) "memory" (printf "%dGi" (mul 8 $gpus)) -}}
{{- $_ := set $spec "podTemplate" (merge (dict "resources" (dict "requests" $requests)) $pod) -}}
{{- end -}}
{{- $spec | toYaml -}}
{{- end }}
